"""Seal, share, cache, evict."""

import pytest

from kvd import errors as e
from kvd.policy import Span
from kvd_daemon.core import QueryShape

from .desk import Desk


def test_sealing_again_what_is_sealed_changes_nothing() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.seal(lease, desk.names(2))
    change = desk.seal(lease, desk.names(2))
    assert (lease.sealed_blocks, lease.generation, change.kept_blocks) == (2, 1, 4)
    desk.seal(lease, desk.names(4))
    assert lease.sealed_blocks == 4


def test_a_block_sealed_before_by_another_is_swapped_in_and_ones_own_is_freed() -> None:
    desk = Desk()
    first, second = desk.prefill(70), desk.prefill(70, who="ben")
    desk.seal(first, desk.names(2))
    free = desk.pool.counts.free
    change = desk.seal(second, desk.names(4))
    assert second.table[:2].tolist() == first.table[:2].tolist()
    assert (change.kept_blocks, second.generation, second.sealed_blocks) == (0, 2, 4)
    assert desk.pool.counts.free == free + 2
    desk.device.check()


def test_another_tenant_never_finds_a_block() -> None:
    desk = Desk()
    mine = desk.prefill(64)
    desk.seal(mine, desk.names(4))
    with pytest.raises(e.PrefixNotFoundError):
        desk.lease(64, who="cat", prefix_hashes=desk.names(4))
    other = desk.prefill(64, who="cat")
    desk.seal(other, desk.names(4))
    assert not set(other.table.tolist()) & set(mine.table.tolist())


@pytest.mark.parametrize(
    ("hashes", "why"),
    [
        ([b"short"], "32 bytes"),
        ([b"x" * 32, b"x" * 32], "named twice"),
        ([bytes([i]) * 32 for i in range(5)], "only 4 blocks are full"),
    ],
)
def test_hashes_are_whole_distinct_and_of_full_blocks(hashes, why) -> None:
    desk = Desk()
    lease = desk.prefill(70)
    with pytest.raises(e.InvalidArgumentError, match=why):
        desk.seal(lease, hashes)
    assert desk.pool.counts.sealed == 0


def test_a_hash_stands_for_one_prefix() -> None:
    desk = Desk()
    first, second = desk.prefill(64), desk.prefill(64)
    desk.seal(first, desk.names(3))
    with pytest.raises(e.InvalidArgumentError, match="another hash"):
        desk.seal(first, desk.names(3, text=1))
    a, b, c = desk.names(3)
    with pytest.raises(e.InvalidArgumentError, match="another parent"):
        desk.seal(second, [a, c, b])


def test_compressed_and_scratch_blocks_are_not_sealed() -> None:
    desk = Desk()
    lease = desk.prefill(160)
    desk.compress(lease, Span(window=16, keep=0.5), QueryShape(16, 4))
    desk.device.finish_compress(lease.lease_id, 80)
    with pytest.raises(e.InvalidArgumentError, match="seal before compressing"):
        desk.seal(lease, desk.names(1))
    scratch = desk.lease(64, scratch=True)
    desk.extend(scratch, 0, length=64)
    with pytest.raises(e.InvalidArgumentError, match="scratch"):
        desk.seal(scratch, desk.names(1))


def test_released_sealed_blocks_are_cached_and_found_again() -> None:
    desk = Desk()
    lease = desk.prefill(64)
    desk.seal(lease, desk.names(4))
    blocks = lease.table.tolist()
    desk.device.release("ann", [lease.lease_id])
    assert desk.pool.counts.cached == 4
    again = desk.lease(64, who="ben", prefix_hashes=desk.names(4))
    assert again.table.tolist() == blocks
    assert (desk.pool.counts.cached, desk.pool.counts.sealed) == (0, 4)


def cached_texts(desk: Desk, texts: int) -> list[int]:
    """How many leading blocks of each text are still there."""
    found = []
    for text in range(texts):
        count = 4
        while count:
            try:
                lease = desk.lease(0, prefix_hashes=desk.names(count, text))
            except e.PrefixNotFoundError as error:
                count = int(error.metadata["found_count"])
                continue
            desk.device.release("ann", [lease.lease_id])
            break
        found.append(count)
    return found


def test_the_least_recently_used_prefix_is_evicted_first_and_its_deepest_block_before_the_others() -> None:
    desk = Desk(blocks=12)
    for text in range(3):
        lease = desk.prefill(64)
        desk.seal(lease, desk.names(4, text))
        desk.device.release("ann", [lease.lease_id])
    used = desk.lease(64, prefix_hashes=desk.names(4, 0))
    desk.device.release("ann", [used.lease_id])
    desk.lease(16 * 3)
    assert cached_texts(desk, 3) == [4, 1, 4]


def test_a_cached_parent_outlives_its_child_though_the_child_was_let_go_later() -> None:
    desk = Desk(blocks=16)
    lease = desk.prefill(16 * 6)
    desk.seal(lease, desk.names(6))
    desk.compress(lease, Span(window=16, keep=0.5, granularity="block"), QueryShape(16, 4))
    desk.device.finish_compress(lease.lease_id, [0, 3, 5])  # lets go 1, 2 and 4 now, the others later
    desk.device.check()
    desk.device.release("ann", [lease.lease_id])
    desk.device.check()
    for count in range(1, 16):
        desk.device.release("ann", [desk.lease(16 * count).lease_id])
        desk.device.check()
    assert desk.pool.counts.free == 15


def test_a_prefix_that_is_asked_for_is_not_evicted_to_make_room_for_what_follows_it() -> None:
    desk = Desk(blocks=8)
    donor = desk.prefill(64)
    desk.seal(donor, desk.names(4))
    desk.device.release("ann", [donor.lease_id])
    lease = desk.lease(128, prefix_hashes=desk.names(4))
    assert len(lease.table) == 8
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(16)
    desk.device.release("ann", [lease.lease_id])
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(16 * 9, prefix_hashes=desk.names(4))
