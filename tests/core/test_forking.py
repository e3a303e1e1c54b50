"""Fork: what is shared, who copies, who need not."""

import pytest

from kvd import errors as e
from kvd.policy import H2O, Span, Streaming
from kvd_daemon.core import Lease

from .desk import QUERIES, Desk


def fork(desk: Desk, lease: Lease, count: int = 1) -> list[Lease]:
    return desk.device.fork(lease.session_id, desk.progress(lease), count, desk.now).children


def grow(desk: Desk, lease: Lease, tokens: int = 1) -> list[tuple[int, int]]:
    """The copies that are made."""
    extended = desk.device.extend(lease.session_id, [(desk.progress(lease), tokens)], desk.now)
    if extended.copies:
        assert lease.state == "compressing"
        desk.device.scrubbed([lease.lease_id])
    desk.device.check()
    return list(extended.copies)


def test_forks_share_every_block_and_hold_nothing_more() -> None:
    desk = Desk()
    parent = desk.prefill(70)
    children = fork(desk, parent, 3)
    assert [child.table.tolist() for child in children] == [parent.table.tolist()] * 3
    assert (desk.pool.counts.sealed, desk.pool.counts.leased) == (5, 0)
    assert desk.pool.holdings.held == {1: 5}
    assert {lease.generation for lease in (parent, *children)} == {1}
    desk.device.check()


def test_only_the_last_block_is_copied_and_the_last_holder_copies_nothing() -> None:
    desk = Desk()
    parent = desk.prefill(70)
    first, second = fork(desk, parent, 2)
    tail, kept = int(parent.table[-1]), parent.table[:4].tolist()
    [(source, target)] = grow(desk, first)
    assert (source, target) == (tail, int(first.table[4]))
    assert (first.table[:4].tolist(), first.generation, first.sealed_blocks) == (kept, 2, 4)
    assert len(grow(desk, parent)) == 1
    assert grow(desk, second) == []
    assert (int(second.table[4]), second.generation, second.sealed_blocks) == (tail, 1, 4)
    assert desk.pool.counts.leased == 3


def test_a_block_that_is_full_is_never_copied() -> None:
    desk = Desk()
    parent = desk.prefill(64)
    [child] = fork(desk, parent)
    assert grow(desk, child, 20) == []
    assert child.table[:4].tolist() == parent.table.tolist()


def test_room_behind_the_tokens_stays_the_parents() -> None:
    desk = Desk()
    parent = desk.prefill(20)
    desk.extend(parent, 60, length=20)
    [child] = fork(desk, parent)
    assert (len(parent.blocks), len(child.blocks)) == (5, 2)
    assert len(grow(desk, parent)) == 1
    assert len(parent.blocks) == 5


def test_a_copy_keeps_its_source_until_it_is_made_though_all_others_have_left() -> None:
    desk = Desk()
    parent = desk.prefill(20)
    [child] = fork(desk, parent)
    tail = int(parent.table[-1])
    desk.device.extend("ann", [(desk.progress(child), 1)], 0)
    desk.device.release("ann", [parent.lease_id])
    assert desk.pool.blocks.state[tail] == 2
    desk.device.check()
    desk.device.scrubbed([child.lease_id])
    assert desk.pool.blocks.state[tail] == 0
    desk.device.check()


@pytest.mark.parametrize("sharers", [1, 2])
def test_a_failed_copy_leaves_the_tail_shared(sharers: int) -> None:
    desk = Desk()
    parent = desk.prefill(20)
    children = fork(desk, parent, sharers)
    before = children[0].table.tolist()
    desk.device.extend("ann", [(desk.progress(each), 30) for each in children], 0)
    desk.device.scrub_failed([each.lease_id for each in children])
    assert children[0].table.tolist() == before
    assert (children[0].sealed_blocks, children[0].generation) == (2, 1)
    assert desk.pool.counts.leased == 0
    desk.device.check()
    assert len(grow(desk, children[0])) == 1


def test_a_tail_taken_back_is_shared_again_when_its_call_is_undone() -> None:
    """Another lease of the call needed blocks that could not be scrubbed."""
    desk = Desk(blocks=8)
    desk.device.release("cat", [desk.prefill(128, who="cat").lease_id])
    parent = desk.prefill(20)
    [child] = fork(desk, parent)
    desk.device.release("ann", [parent.lease_id])
    extended = desk.device.extend("ann", [(desk.progress(child), 40)], 0)
    assert (bool(extended.scrub), list(extended.copies)) == (True, [])
    desk.device.scrub_failed([child.lease_id])
    assert child.sealed_blocks == 2
    desk.device.check()


def test_nothing_is_written_behind_a_shared_tail() -> None:
    desk = Desk()
    parent = desk.prefill(20)
    fork(desk, parent)
    for length in (21, 32):
        with pytest.raises(e.InvalidArgumentError, match="extend first"):
            desk.device.renew("ann", [desk.progress(parent, length)], 0)


def test_blocks_of_a_fork_get_names_where_they_are_and_everybody_has_them() -> None:
    desk = Desk()
    parent = desk.prefill(70)
    [child] = fork(desk, parent)
    change = desk.seal(child, desk.names(4))
    assert (change.kept_blocks, child.generation, child.sealed_blocks) == (5, 1, 5)
    assert desk.seal(parent, desk.names(4)).kept_blocks == 5
    with pytest.raises(e.InvalidArgumentError, match="another hash"):
        desk.seal(parent, desk.names(4, text=7))
    desk.device.release("ann", [parent.lease_id, child.lease_id])
    assert (desk.pool.counts.cached, desk.pool.counts.sealed) == (4, 0)
    desk.device.check()


def test_blocks_of_a_fork_are_swapped_for_those_sealed_before() -> None:
    desk = Desk()
    other, parent = desk.prefill(64), desk.prefill(70)
    [child] = fork(desk, parent)
    desk.seal(other, desk.names(4))
    change = desk.seal(child, desk.names(4))
    assert (change.kept_blocks, child.generation, child.sealed_blocks) == (0, 2, 5)
    assert child.table[:4].tolist() == other.table.tolist()
    assert desk.pool.counts.sealed == 9
    desk.device.check()
    desk.seal(parent, desk.names(4))
    assert desk.pool.counts.sealed == 5
    desk.device.check()


def test_compressed_forks_have_no_names_and_compress_on_their_own() -> None:
    desk = Desk()
    parent = desk.prefill(160)
    desk.compress(parent, Span(window=8, keep=0.5, granularity="block"))
    desk.device.finish_compress(parent.lease_id, [0, 2, 4, 8, 9])
    [child] = fork(desk, parent)
    assert (child.compressed_length, child.position) == (parent.compressed_length, 160)
    with pytest.raises(e.InvalidArgumentError, match="private"):
        desk.seal(child, desk.names(1))
    desk.compress(child, Span(window=8, keep=0.5, granularity="block"))
    desk.device.finish_compress(child.lease_id, [0, 3, 4])
    assert parent.table.size == 5
    desk.device.check()


def test_running_scores_of_shared_blocks_are_not_written_by_one_of_those_who_share_them() -> None:
    desk = Desk()
    policy = H2O(sinks=1, recent=8, keep=0.5)
    parent = desk.prefill(64, policy)
    desk.device.begin_observe("ann", desk.progress(parent), QUERIES, 0)
    desk.device.finish_observe(parent.lease_id)
    [child] = fork(desk, parent)
    assert child.observed_length == 64
    with pytest.raises(e.InvalidArgumentError, match="shared blocks"):
        desk.device.begin_observe("ann", desk.progress(child), QUERIES, 0)
    desk.extend(child, 0)
    desk.extend(child, 80, length=64)
    desk.extend(child, 0, length=144)
    with pytest.raises(e.InvalidArgumentError, match="shares blocks with forks"):
        desk.compress(child, policy)
    desk.compress(child, policy, queries=None)
    desk.device.finish_compress(child.lease_id, policy.target_tokens(144, 16))
    assert parent.observed_length == 64
    desk.device.check()


def test_what_is_written_again_cannot_be_forked() -> None:
    desk = Desk()
    for lease in (desk.lease(64, Streaming(4, 20)), desk.lease(16, scratch=True)):
        with pytest.raises(e.InvalidArgumentError, match="written again"):
            fork(desk, lease)
    parent = desk.prefill(20)
    for count in (0, 1025):
        with pytest.raises(e.InvalidArgumentError, match="forks"):
            fork(desk, parent, count)
