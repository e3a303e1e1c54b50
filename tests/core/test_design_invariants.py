"""The invariants of the design, each by the sentences that promise it."""

import pytest

from kvd import errors as e
from kvd.policy import SnapKV, Streaming
from kvd_daemon.core import (
    BlockState,
    InvariantError,
    LeaseState,
    LeaseWish,
    Progress,
    QueryShape,
    Quota,
    SessionState,
)

from .desk import QUERIES, TTL, Desk
from .snapshot import snapshot

SNAP = SnapKV(window=32, keep=0.25)

# 1. free + leased + sealed + cached + quarantined + null == total


def test_every_block_is_in_exactly_one_state_through_a_crash_and_its_aftermath() -> None:
    desk = Desk(blocks=64)
    sealed, leased, busy = desk.prefill(64), desk.prefill(64), desk.prefill(320, SNAP)
    desk.seal(sealed, desk.names(4))
    desk.compress(busy)
    assert desk.pool.counts == (64 - 4 - 4 - 20 - 5, 4 + 20 + 5, 4, 0, 0, 1)
    desk.now = TTL
    desk.device.expire(desk.now)
    assert desk.pool.counts == (31, 25, 0, 4, 4, 1)
    desk.device.abort_compress(busy.lease_id, lost=False)
    assert desk.pool.counts == (36, 0, 0, 4, 24, 1)
    desk.device.session_gone("ann")
    assert desk.pool.counts == (60, 0, 0, 4, 0, 1)
    assert leased.lease_id not in desk.device.leases
    desk.device.check()


def test_books_that_do_not_add_up_are_named() -> None:
    desk = Desk()
    lease = desk.lease(64)
    desk.pool.blocks.state[int(lease.table[0])] = BlockState.FREE
    with pytest.raises(InvariantError, match="wrong state"):
        desk.device.check()


# 2. A block is writable by at most one live lease; sealed ones by nobody


def test_no_two_leases_get_the_same_block() -> None:
    desk = Desk(blocks=64)
    leases = [desk.lease(48) for _ in range(20)]
    blocks = [block for lease in leases for block in lease.table.tolist()]
    assert len(set(blocks)) == 60
    assert 0 not in blocks


def test_a_prefix_is_shared_and_the_blocks_behind_it_are_ones_own() -> None:
    desk = Desk()
    first = desk.prefill(70)
    desk.seal(first, desk.names(4))
    second = desk.lease(90, who="ben", prefix_hashes=desk.names(4))
    assert second.table[:4].tolist() == first.table[:4].tolist()
    assert not set(second.writable.tolist()) & set(first.table.tolist())
    assert (second.length, second.position, second.sealed_blocks) == (64, 64, 4)


# 3. References are held by name; twice, foreign, null and [b, b] change nothing


def test_a_lease_is_released_once_and_by_its_owner() -> None:
    desk = Desk()
    lease = desk.lease(64)
    refused = [
        (e.NotOwnerError, "ben", [lease.lease_id]),
        (e.InvalidArgumentError, "ann", [lease.lease_id, lease.lease_id]),
        (e.LeaseNotFoundError, "ann", [lease.lease_id, 999]),
        (e.SessionNotFoundError, "nobody", [lease.lease_id]),
    ]
    before = snapshot(desk.device)
    for error, who, ids in refused:
        with pytest.raises(error):
            desk.device.release(who, ids)
        assert snapshot(desk.device) == before
    desk.device.release("ann", [lease.lease_id])
    with pytest.raises(e.LeaseNotFoundError):
        desk.device.release("ann", [lease.lease_id])


def test_blocks_are_given_back_once_by_their_holder_and_only_if_they_hold_no_token() -> None:
    desk = Desk()
    lease, other = desk.lease(160), desk.lease(16)
    progress = desk.progress(lease, 40)
    unused, used = lease.table[3:].tolist(), int(lease.table[0])
    before = snapshot(desk.device)
    refused = [
        (e.BlockNotHeldError, [0]),
        (e.BlockNotHeldError, [unused[0], unused[0]]),
        (e.BlockNotHeldError, [int(other.table[0])]),
        (e.BlockNotHeldError, [10**9]),
        (e.BlockInUseError, [unused[0], used]),
    ]
    for error, ids in refused:
        with pytest.raises(error):
            desk.device.release_blocks("ann", progress, ids)
        assert snapshot(desk.device) == before
    change = desk.device.release_blocks("ann", progress, [unused[2], unused[0]])
    assert change.kept_blocks == 3
    assert lease.table[3:].tolist() == [unused[1], *unused[3:]]
    assert lease.generation == 1
    desk.device.check()


# 4. All or nothing


def test_leases_are_granted_all_or_none() -> None:
    desk = Desk(blocks=64)
    before = snapshot(desk.device)
    with pytest.raises(e.PoolExhaustedError, match="64 blocks wanted in pool pool, 62 free"):
        desk.device.lease("ann", "pool", [LeaseWish(16 * 32), LeaseWish(16 * 32)], 0)
    assert snapshot(desk.device) == before


def test_leases_are_extended_all_or_none() -> None:
    desk = Desk(blocks=64)
    first, second = desk.lease(160), desk.lease(160)
    before = snapshot(desk.device)
    items = [(desk.progress(first, 10), 400), (desk.progress(second, 10), 2000)]
    with pytest.raises(e.PoolExhaustedError):
        desk.device.extend("ann", items, 0)
    assert snapshot(desk.device) == before


def test_a_prefix_is_found_whole_or_not_at_all_and_the_error_says_how_much_is_there() -> None:
    desk = Desk()
    donor = desk.prefill(64)
    desk.seal(donor, desk.names(3))
    before = snapshot(desk.device)
    with pytest.raises(e.PrefixNotFoundError) as caught:
        desk.lease(100, prefix_hashes=desk.names(5))
    assert caught.value.metadata["found_count"] == "3"
    assert snapshot(desk.device) == before


# 5. A TTL is not a fence


def test_an_expired_worker_blocks_are_quarantined_until_its_process_is_gone() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.now = TTL
    assert desk.device.expire(desk.now) == [lease]
    assert (lease.state, desk.pool.counts.quarantined) == (LeaseState.EXPIRED, 4)
    desk.device.session_gone("ann")
    assert (desk.pool.counts.quarantined, desk.pool.counts.free) == (0, 64)


def test_an_expired_worker_may_still_say_that_it_has_stopped_writing() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.now = TTL
    desk.device.expire(desk.now)
    desk.device.release("ann", [lease.lease_id])
    assert desk.pool.counts.free == 64


@pytest.mark.parametrize("noticed", [True, False])
def test_a_renewal_never_resurrects_an_expired_session(noticed) -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.now = TTL
    if noticed:
        desk.device.expire(desk.now)
    with pytest.raises(e.SessionExpiredError):
        desk.device.renew("ann", [], desk.now)
    with pytest.raises(e.SessionExpiredError):
        desk.extend(lease, 1)
    desk.device.expire(desk.now)
    assert desk.device.sessions["ann"].state is SessionState.EXPIRED


def test_a_renewed_session_lives_on_detached_or_not() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.device.detach("ann", 0)
    assert desk.device.sessions["ann"].state is SessionState.DETACHED
    desk.now = TTL - 1
    desk.device.renew("ann", [], desk.now)
    assert desk.device.sessions["ann"].state is SessionState.ACTIVE
    desk.now += TTL - 1
    assert lease not in desk.device.expire(desk.now)


def test_a_revoked_lease_waits_in_quarantine_for_its_worker() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    assert desk.device.revoke(lease.lease_id).quarantined_count == 4
    for call in (lambda: desk.extend(lease, 1), lambda: desk.device.revoke(lease.lease_id)):
        with pytest.raises(e.LeaseRevokedError):
            call()
    desk.device.release("ann", [lease.lease_id])
    assert desk.pool.counts.free == 64


def test_a_busy_lease_of_a_dead_worker_ends_with_its_job() -> None:
    desk = Desk()
    lease, scratch = desk.prefill(320, SNAP), desk.lease(64, scratch=True)
    desk.compress(lease, None, QueryShape(32, 4, scratch.lease_id))
    reclaimed = desk.device.session_gone("ann")
    assert (reclaimed.leases, reclaimed.deferred) == ([], [lease, scratch])
    assert desk.pool.counts.leased == 29
    desk.device.check()
    desk.device.finish_compress(lease.lease_id, 80)
    assert desk.pool.counts.free == 64
    assert not desk.device.leases
    desk.device.check()


# 6. Stale or out-of-range is an error


def test_a_worker_that_knows_an_older_generation_is_told_so() -> None:
    desk = Desk()
    lease = desk.prefill(320, SNAP)
    old = desk.progress(lease)
    desk.compress(lease)
    desk.device.finish_compress(lease.lease_id, 80)
    with pytest.raises(e.StaleGenerationError, match="generation 2, not 1"):
        desk.device.extend("ann", [(old, 1)], 0)


@pytest.mark.parametrize(
    ("length", "position"), [(63, 64), (65, 200), (200, 64), (97, 97), (64, 63), (80, 79), (70, 71), (-1, -1)]
)
def test_a_lease_cannot_stand_where_its_worker_cannot_have_got(length, position) -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.extend(lease, 32)
    before = snapshot(desk.device)
    with pytest.raises(e.InvalidArgumentError):
        desk.device.extend("ann", [(Progress(lease.lease_id, 1, length, position), 1)], 0)
    assert snapshot(desk.device) == before


def test_an_empty_lease_may_begin_at_any_position() -> None:
    desk = Desk()
    lease = desk.lease(64)
    desk.device.extend("ann", [(Progress(lease.lease_id, 1, 10, 5010), 0)], 0)
    assert (lease.length, lease.position) == (10, 5010)


def test_a_late_renewal_is_passed_over_and_a_false_one_refused() -> None:
    desk = Desk()
    lease, foreign = desk.prefill(64), desk.prefill(64, who="ben")
    late = [Progress(lease.lease_id, 1, 10, 10), Progress(lease.lease_id, 0, 64, 64), Progress(77, 1, 1, 1)]
    desk.device.renew("ann", late, 0)
    assert lease.length == 64
    with pytest.raises(e.InvalidArgumentError):
        desk.device.renew("ann", [Progress(lease.lease_id, 1, 65, 65)], 0)
    with pytest.raises(e.NotOwnerError):
        desk.device.renew("ann", [desk.progress(foreign)], 0)


# 7. Memory that changes tenant is scrubbed first


def test_blocks_of_another_tenant_are_scrubbed_before_the_lease_can_be_used() -> None:
    desk = Desk(blocks=10)
    mine = desk.prefill(160)
    desk.device.release("ann", [mine.lease_id])
    granted = desk.device.lease("cat", "pool", [LeaseWish(48)], 0)
    lease = granted.leases[0]
    assert granted.scrub == [(1, 3)]
    assert lease.state is LeaseState.COMPRESSING
    with pytest.raises(e.LeaseBusyError):
        desk.device.extend("cat", [(desk.progress(lease), 1)], 0)
    desk.device.scrubbed([lease.lease_id])
    assert lease.state is LeaseState.ACTIVE


def test_blocks_of_ones_own_tenant_and_untouched_ones_are_not_scrubbed() -> None:
    desk = Desk(blocks=20)
    mine = desk.prefill(160)
    desk.device.release("ann", [mine.lease_id])
    assert desk.device.lease("ben", "pool", [LeaseWish(160)], 0).scrub == []
    assert desk.device.lease("cat", "pool", [LeaseWish(160)], 0).scrub == []


def test_a_failed_scrub_undoes_the_call_and_the_blocks_stay_suspect() -> None:
    desk = Desk(blocks=12)
    lease = desk.prefill(64, who="cat")
    mine = desk.prefill(128)
    desk.device.release("ann", [mine.lease_id])
    extended = desk.device.extend("cat", [(desk.progress(lease), 64)], 0)
    assert extended.scrub
    desk.device.scrub_failed([lease.lease_id])
    assert (len(lease.table), lease.state, desk.pool.counts.free) == (4, LeaseState.ACTIVE, 8)
    granted = desk.device.lease("ann", "pool", [LeaseWish(128)], 0)
    assert granted.scrub == extended.scrub  # even for their former tenant: half of them may be zeroed
    desk.device.scrub_failed([granted.leases[0].lease_id])
    assert granted.leases[0].lease_id not in desk.device.leases
    desk.device.check()


def test_what_a_compression_takes_over_is_scrubbed_and_an_aborted_one_leaves_nothing_unscrubbed() -> None:
    desk = Desk(blocks=40)
    lease = desk.prefill(320, SNAP)
    foreign = desk.prefill(160, who="cat")
    desk.device.release("cat", [foreign.lease_id])
    plan = desk.compress(lease)
    assert plan.scrub == [(21, 5)]
    desk.device.abort_compress(lease.lease_id, lost=False)
    granted = desk.device.lease("cat", "pool", [LeaseWish(160)], 0)
    assert granted.leases[0].table.tolist() == list(range(21, 31))
    assert granted.scrub == [(21, 5)]  # the job may have written half of them


# 8. Sinks and window: see test_compression.py and test_streaming_leases.py


def test_locked_sink_blocks_are_counted_as_far_as_they_are_in_use() -> None:
    desk = Desk()
    lease = desk.lease(0, Streaming(sinks=20, window=64))
    assert lease.sink_blocks == 0
    desk.extend(lease, 16)
    desk.extend(lease, 1, length=16)
    assert lease.sink_blocks == 1
    desk.extend(lease, 1, length=40)
    assert lease.sink_blocks == 2


# 9. Nothing slow inside


def test_the_core_imports_nothing_that_could_block() -> None:
    import ast
    from pathlib import Path

    import kvd_daemon.core as core

    allowed = {"numpy", "kvd", "dataclasses", "enum", "typing", "collections"}
    allowed |= {"array", "heapq", "itertools", "operator", "re"}
    for file in Path(core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert {name.split(".")[0] for name in names} <= allowed, file


def test_a_full_pool_can_still_be_compressed_through_the_reserve() -> None:
    desk = Desk(blocks=64)
    assert desk.pool.blocks_reserved == 2
    lease = desk.prefill(16 * 62, SNAP)
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(1)
    scratch = desk.lease(32, scratch=True)
    plan = desk.compress(lease, None, QueryShape(32, 4, scratch.lease_id))
    assert plan.in_place
    assert QUERIES.tokens == plan.window


@pytest.mark.parametrize("how", ["match", "pin", "lease"])
def test_cached_blocks_that_are_woken_leave_the_reserve_alone(how: str) -> None:
    desk = Desk(blocks=64)
    desk.device.set_quotas({"red": Quota(pin_blocks=64)}, Quota())
    names = desk.names(62)
    lease = desk.prefill(16 * 62)
    desk.seal(lease, names)
    desk.device.release("ann", [lease.lease_id])
    last = desk.lease(16 * 2)  # the free ones: those that are left are cached
    wake = {
        "match": lambda hashes: desk.device.match("ann", "pool", hashes, TTL, 0),
        "pin": lambda hashes: desk.device.pin("ann", "pool", hashes),
        "lease": lambda hashes: desk.lease(16 * len(hashes), prefix_hashes=hashes),
    }[how]
    with pytest.raises(e.PoolExhaustedError, match="62 blocks wanted in pool pool, 60 free"):
        wake(names)
    wake(names[:60])
    assert len(desk.lease(16 * 2, scratch=True).blocks) == 2
    desk.device.release("ann", [last.lease_id])
    desk.device.check()
