"""Begin, then finish or abort; where the kept tokens go, and when a compression is refused."""

import pytest

from kvd import errors as e
from kvd.policy import H2O, Dense, Dual, SnapKV, Span, Streaming
from kvd_daemon.core import BlockState, LeaseState, QueryShape, Unchanged

from .desk import QUERIES, Desk

SNAP = SnapKV(window=32, keep=0.25)
BLOCKS = Span(window=32, keep=0.5, granularity="block")


def test_kept_tokens_go_to_free_blocks_where_there_are_some() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    source = lease.table.tolist()
    plan = desk.compress(lease)
    assert plan.source.tolist() == source
    assert not plan.in_place
    assert plan.destination.size == 5
    assert not set(plan.destination.tolist()) & set(source)
    assert (plan.target_tokens, plan.window) == (80, 32)
    done = desk.device.finish_compress(lease.lease_id, 80)
    assert (done.tokens_before, done.tokens_kept) == (320, 80)
    assert (done.blocks_before, done.blocks_after, done.out_of_place) == (20, 5, True)
    assert lease.table.tolist() == plan.destination.tolist()
    assert (lease.length, lease.position, lease.compressed_length) == (80, 320, 80)
    assert (lease.generation, lease.blocks_saved) == (2, 15)
    assert desk.pool.counts.leased == 5
    totals = desk.pool.totals
    assert (totals.compressions, totals.blocks_saved, totals.tokens_dropped) == (1, 15, 240)


def test_kept_tokens_move_to_the_front_where_no_block_is_free() -> None:
    desk = Desk(blocks=20)
    lease = desk.prefill(320, SNAP)
    front = lease.table[:5].tolist()
    generations = desk.pool.blocks.generation[front].tolist()
    plan = desk.compress(lease)
    assert plan.in_place
    assert plan.destination.tolist() == front
    desk.device.finish_compress(lease.lease_id, 80)
    assert lease.table.tolist() == front
    assert desk.pool.counts.free == 15
    assert desk.pool.blocks.generation[front].tolist() == [one + 1 for one in generations]


def test_the_reserve_for_scratch_is_no_room_for_kept_tokens() -> None:
    desk = Desk(blocks=64)  # 2 blocks are reserved
    lease = desk.prefill(320, SNAP)
    desk.lease(16 * (64 - 20 - 5))  # 5 usable, 3 of them without the reserve
    assert desk.compress(lease).in_place


def test_no_more_tokens_than_the_policy_keeps_changes_nothing() -> None:
    desk = Desk()
    lease = desk.prefill(90, SnapKV(window=32, keep=100))
    assert isinstance(desk.compress(lease), Unchanged)
    assert isinstance(desk.compress(lease, Dense(), None), Unchanged)
    assert (lease.generation, lease.length, lease.state) == (1, 90, LeaseState.ACTIVE)


def test_a_short_prompt_with_sinks_and_window_beyond_the_budget_is_refused() -> None:
    desk = Desk()
    lease = desk.prefill(17)
    with pytest.raises(e.InvalidArgumentError, match="sinks and window alone need 64"):
        desk.compress(lease, SnapKV(window=64, keep=0.5))
    assert lease.state is LeaseState.ACTIVE


def test_a_voting_policy_without_queries_says_what_to_pass() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    with pytest.raises(e.InvalidArgumentError, match="pass them in a scratch lease"):
        desk.compress(lease, None, None)


def test_fewer_queries_than_the_window_make_a_smaller_window() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    assert desk.compress(lease, None, QueryShape(tokens=7, query_heads=4)).window == 7


@pytest.mark.parametrize("shape", [QueryShape(0, 4), QueryShape(32, 3), QueryShape(32, 0)])
def test_queries_need_a_token_and_a_multiple_of_the_kv_heads(shape) -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    with pytest.raises(e.InvalidArgumentError):
        desk.compress(lease, None, shape)


def test_dual_tells_the_kernel_worker_its_sinks_by_its_policy() -> None:
    desk = Desk()
    lease = desk.prefill(320)
    plan = desk.compress(lease, Dual(window=32, keep=0.25))
    assert (plan.policy.sinks, plan.window, plan.target_tokens) == (4, 32, 80)


def test_a_dense_lease_is_pruned_to_sinks_and_window_in_one_shot() -> None:
    desk = Desk()
    lease = desk.prefill(320)
    plan = desk.compress(lease, Streaming(sinks=4, window=30), None)
    assert (plan.target_tokens, plan.window, plan.destination.size) == (34, 30, 3)
    desk.device.finish_compress(lease.lease_id, 34)
    assert (lease.length, lease.capacity, lease.position) == (34, 48, 320)


def test_a_compressed_lease_grows_and_is_compressed_again() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.compress(lease)
    desk.device.finish_compress(lease.lease_id, 80)
    desk.extend(lease, 100)
    assert (lease.length, lease.compressed_length) == (80, 80)
    desk.extend(lease, 0, length=180)
    assert (lease.length, lease.position, lease.compressed_length) == (180, 420, 80)
    assert desk.compress(lease).target_tokens == 48


def test_an_aborted_compression_leaves_the_lease_as_it_was() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    table, free = lease.table.tolist(), desk.pool.counts.free
    desk.compress(lease)
    desk.device.abort_compress(lease.lease_id, lost=False)
    assert (lease.table.tolist(), lease.generation, lease.length) == (table, 1, 320)
    assert (lease.state, desk.pool.counts.free) == (LeaseState.ACTIVE, free)


def test_a_kernel_worker_that_dies_while_it_moves_bytes_in_place_loses_that_lease_only() -> None:
    desk = Desk(blocks=40)
    other, lease = desk.prefill(300), desk.prefill(320, SNAP)
    assert desk.compress(lease).in_place
    desk.device.abort_compress(lease.lease_id, lost=True)
    assert lease.state is LeaseState.LOST
    with pytest.raises(e.LeaseLostError):
        desk.extend(lease, 1)
    assert other.state is LeaseState.ACTIVE
    desk.device.release("ann", [lease.lease_id])
    desk.device.check()


def test_a_busy_lease_refuses_everything_but_its_jobs_end() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.compress(lease)
    calls = [
        lambda: desk.extend(lease, 1),
        lambda: desk.compress(lease),
        lambda: desk.seal(lease, desk.names(1)),
        lambda: desk.device.release("ann", [lease.lease_id]),
    ]
    for call in calls:
        with pytest.raises(e.LeaseBusyError):
            call()


def test_an_in_place_job_that_dies_suspends_a_lease_that_was_parked_before() -> None:
    desk = Desk(blocks=16)
    desk.device.set_tiers(1 << 20, 0)
    lease = desk.prefill(256)
    plan = desk.device.begin_compress("ann", desk.progress(lease), SNAP, QUERIES, desk.now, park=True)
    assert plan.in_place
    assert plan.slots.size == 16
    generation, checksums = lease.generation, list(range(16))
    desk.device.abort_compress(lease.lease_id, lost=True, checksums=checksums)
    assert (lease.state, lease.fence, desk.pool.counts.free) == (LeaseState.SUSPENDED, 0, 16)
    desk.device.check()
    fetched = desk.device.begin_resume("ann", lease.lease_id, generation, desk.now)
    assert fetched.parked.checksums.tolist() == checksums
    desk.device.finish_fetch(lease.lease_id)
    assert (lease.state, lease.length, lease.position) == (LeaseState.ACTIVE, 256, 256)
    assert lease.generation == generation + 1
    desk.device.check()


@pytest.mark.parametrize("lost", [False, True])
def test_a_busy_lease_is_revoked_when_its_job_has_ended(lost: bool) -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.compress(lease)
    revoked = desk.device.revoke(lease.lease_id)
    assert (revoked.deferred, revoked.quarantined_count) == (True, 0)
    assert (lease.state, lease.fence) == (LeaseState.COMPRESSING, 0)
    with pytest.raises(e.LeaseRevokedError):
        desk.device.revoke(lease.lease_id)
    desk.device.abort_compress(lease.lease_id, lost)
    assert lease.state is LeaseState.REVOKED
    desk.device.check()
    desk.device.release("ann", [lease.lease_id])
    desk.device.check()


def test_a_revoked_lease_stays_revoked_when_its_session_expires_before_the_job_ends() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.compress(lease)
    desk.device.revoke(lease.lease_id)
    desk.device.expire(desk.device.sessions["ann"].expires_ns)
    desk.device.abort_compress(lease.lease_id, lost=False)
    assert lease.state is LeaseState.REVOKED


def test_a_lease_that_goes_with_its_job_is_not_taken_away_on_top() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.compress(lease)
    desk.device.expire(desk.device.sessions["ann"].expires_ns)
    with pytest.raises(e.LeaseExpiredError):
        desk.device.revoke(lease.lease_id)
    desk.device.session_gone("ann")
    with pytest.raises(e.LeaseBusyError):
        desk.device.revoke(lease.lease_id)


def test_queries_cannot_be_released_while_they_are_read() -> None:
    desk = Desk()
    lease, scratch = desk.prefill(320, SNAP), desk.lease(64, scratch=True)
    desk.compress(lease, None, QueryShape(32, 4, scratch.lease_id))
    with pytest.raises(e.LeaseBusyError):
        desk.device.release("ann", [scratch.lease_id])
    desk.device.finish_compress(lease.lease_id, 80)
    desk.device.release("ann", [scratch.lease_id])


def test_queries_lie_in_a_scratch_lease_of_ones_own() -> None:
    desk = Desk()
    lease, dense, foreign = desk.prefill(320, SNAP), desk.lease(64), desk.lease(64, who="ben", scratch=True)
    with pytest.raises(e.InvalidArgumentError, match="scratch lease of pool pool"):
        desk.compress(lease, None, QueryShape(32, 4, dense.lease_id))
    with pytest.raises(e.NotOwnerError):
        desk.compress(lease, None, QueryShape(32, 4, foreign.lease_id))


def test_whole_blocks_leave_the_table_and_sealed_ones_stay_shared() -> None:
    desk = Desk()
    lease = desk.prefill(150)
    desk.seal(lease, desk.names(6))
    sharer = desk.lease(150, prefix_hashes=desk.names(6))
    table = lease.table.tolist()
    plan = desk.compress(lease, BLOCKS)
    assert plan.by_block
    assert plan.destination.size == 0
    assert plan.target_tokens == 80
    done = desk.device.finish_compress(lease.lease_id, [0, 3, 7, 8, 9])
    assert lease.table.tolist() == [table[i] for i in (0, 3, 7, 8, 9)]
    assert (lease.sealed_blocks, lease.length, lease.compressed_length) == (2, 70, 70)
    assert (done.tokens_kept, done.out_of_place) == (70, False)
    assert sharer.table[:6].tolist() == table[:6]
    assert desk.pool.counts.sealed == 6
    desk.device.check()


@pytest.mark.parametrize(
    "kept",
    [
        [0, 3, 7, 8],
        [3, 0, 7, 8, 9],
        [1, 3, 7, 8, 9],
        [0, 3, 6, 7, 9],
        [0, 1, 2, 3, 8, 9],
        [-1, 0, 7, 8, 9],
    ],
)
def test_kept_blocks_ascend_are_as_many_as_planned_and_hold_sinks_and_window(kept) -> None:
    desk = Desk()
    lease = desk.prefill(150)
    desk.compress(lease, BLOCKS)
    with pytest.raises(e.InvalidArgumentError):
        desk.device.finish_compress(lease.lease_id, kept)
    desk.device.finish_compress(lease.lease_id, [0, 3, 7, 8, 9])


def test_a_sharer_is_compressed_out_of_place_and_the_shared_blocks_stay() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.seal(lease, desk.names(10))
    sharer = desk.lease(320, SNAP, prefix_hashes=desk.names(10))
    assert not desk.compress(lease).in_place
    desk.device.finish_compress(lease.lease_id, 80)
    assert lease.sealed_blocks == 0
    assert sharer.sealed_blocks == 10
    assert desk.pool.counts.sealed == 10


def test_a_sharer_whose_copy_would_take_more_than_it_frees_is_refused() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    desk.seal(lease, desk.names(20))
    sharer = desk.lease(320, SNAP, prefix_hashes=desk.names(20))
    with pytest.raises(e.CompressionRefusedError, match="would take 5 blocks and free 0"):
        desk.compress(sharer)
    desk.extend(sharer, 0, length=320)
    desk.device.release("ann", [lease.lease_id])  # now it holds them alone: they would become evictable
    assert desk.compress(sharer).destination.size == 5


def test_a_sharer_with_no_room_for_its_copy_is_refused_too() -> None:
    desk = Desk(blocks=21)
    lease = desk.prefill(320, SNAP)
    desk.seal(lease, desk.names(3))
    with pytest.raises(e.PoolExhaustedError):
        desk.compress(lease)


def test_heavy_hitters_need_scores_or_queries() -> None:
    desk = Desk()
    lease = desk.prefill(320, H2O(recent=32, keep=0.25))
    with pytest.raises(e.InvalidArgumentError, match="call Observe before"):
        desk.compress(lease, None, None)
    plan = desk.device.begin_observe("ann", desk.progress(lease), QueryShape(320, 4), 0)
    assert (plan.tokens, plan.observed_length) == (320, 0)
    desk.device.finish_observe(lease.lease_id)
    assert lease.observed_length == 320
    desk.compress(lease, None, None)
    desk.device.finish_compress(lease.lease_id, 80)
    assert lease.observed_length == 80


def test_no_token_votes_twice() -> None:
    desk = Desk()
    lease = desk.prefill(320)
    desk.device.begin_observe("ann", desk.progress(lease), QueryShape(300, 4), 0)
    desk.device.finish_observe(lease.lease_id)
    with pytest.raises(e.InvalidArgumentError, match="only the last 0"):
        desk.device.begin_observe("ann", desk.progress(lease), QUERIES, 0)


def test_heavy_hitters_with_queries_are_observed_and_compressed_in_one_and_again_if_that_fails() -> None:
    desk = Desk()
    lease = desk.prefill(320, H2O(recent=32, keep=0.25))
    desk.device.begin_observe("ann", desk.progress(lease), QueryShape(320, 4), 0)
    desk.device.finish_observe(lease.lease_id)
    desk.extend(lease, 10)
    desk.extend(lease, 0, length=330)
    with pytest.raises(e.InvalidArgumentError, match="only the last 10"):
        desk.compress(lease)
    desk.compress(lease, None, QueryShape(10, 4))
    desk.device.abort_compress(lease.lease_id, lost=False)
    assert lease.observed_length == 0  # some of the ten may have voted: their sums cannot be told apart
    desk.compress(lease, None, QueryShape(330, 4))
    desk.device.finish_compress(lease.lease_id, 96)
    assert lease.observed_length == 96


def test_running_scores_are_private_to_a_lease() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.device.begin_observe("ann", desk.progress(lease), QUERIES, 0)
    desk.device.finish_observe(lease.lease_id)
    with pytest.raises(e.InvalidArgumentError, match="before the first Observe"):
        desk.seal(lease, desk.names(1))
    sealed = desk.prefill(64)
    desk.seal(sealed, desk.names(1))
    with pytest.raises(e.InvalidArgumentError, match="shared"):
        desk.device.begin_observe("ann", desk.progress(sealed), QUERIES, 0)


def test_the_destination_takes_cached_blocks_and_not_the_reserve() -> None:
    desk = Desk(blocks=40)
    donor = desk.prefill(16 * 10)
    desk.seal(donor, desk.names(10))
    desk.device.release("ann", [donor.lease_id])
    lease = desk.prefill(16 * 30, SNAP)
    assert desk.pool.counts == (0, 30, 0, 10, 0, 1)
    plan = desk.compress(lease)
    assert not plan.in_place
    assert (desk.pool.blocks.state[plan.destination] == BlockState.LEASED).all()
    assert desk.pool.counts.cached == 2


def test_explicit_positions_end_where_int32_does() -> None:
    desk = Desk()
    lease = desk.lease(320, SNAP)
    far = desk.progress(lease, 320).__class__(lease.lease_id, 1, 320, 2**31)
    with pytest.raises(e.LimitExceededError, match="int32"):
        desk.device.begin_compress("ann", far, None, QUERIES, 0)
