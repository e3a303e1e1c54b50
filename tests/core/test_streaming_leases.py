"""A streaming lease holds sinks and a window in the same number of blocks for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import errors as e
from kvd.policy import SnapKV, Streaming
from kvd.spec import KVSpec
from kvd_daemon.core import Lease, Unchanged

from .desk import QUERIES, Desk

CHAT = Streaming(sinks=4, window=1020)


class Worker:
    """What a client does with the replies, and the memory it writes to."""

    def __init__(self, desk: Desk, policy: Streaming) -> None:
        self.desk, self.policy = desk, policy
        self.lease: Lease = desk.lease(0, policy)
        self.block_size = desk.pool.spec.block_size
        self.length = self.position = 0
        self.memory: dict[tuple[int, int], int] = {}

    def append(self, count: int) -> None:
        """Ask for room, then write what has a slot: the three lines of ARCHITECTURE.md."""
        before = self.position
        progress = self.desk.progress(self.lease, self.length)
        reply = self.desk.device.extend("ann", [(progress, count)], 0).leases[0]
        tokens = list(range(before, before + count))
        skipped = reply.lease.position - before
        stored = tokens[: reply.skip_after] + tokens[reply.skip_after + skipped :]
        self.length, self.position = reply.lease.length, reply.lease.position
        for token in stored:
            self.memory[self.slot(self.length)] = token
            self.length += 1
        self.position += len(stored)
        assert self.position == before + count

    def slot(self, index: int) -> tuple[int, int]:
        return int(self.lease.table[index // self.block_size]), index % self.block_size

    def tokens(self) -> list[int]:
        """What every slot in use holds."""
        return [self.memory[self.slot(index)] for index in range(self.length)]

    def told_positions(self) -> list[int]:
        """What the contract says every slot in use holds."""
        sinks = self.policy.sink_blocks(self.block_size) * self.block_size
        return [slot if slot < sinks else self.position - (self.length - slot) for slot in range(self.length)]


def test_ten_thousand_tokens_one_by_one_never_take_another_block() -> None:
    worker = Worker(Desk(blocks=100), CHAT)
    blocks = sorted(worker.lease.table.tolist())
    assert len(blocks) == 1 + 64 + 1
    for _ in range(10_000):
        worker.append(1)
        assert len(worker.lease.table) == len(blocks)
    assert sorted(worker.lease.table.tolist()) == blocks
    assert worker.desk.pool.counts.leased == len(blocks)
    assert worker.tokens() == worker.told_positions()
    assert worker.tokens()[:4] == [0, 1, 2, 3]
    assert worker.tokens()[-1020:] == list(range(10_000 - 1020, 10_000))


def test_every_new_token_sees_the_sinks_and_the_whole_window() -> None:
    worker = Worker(Desk(blocks=20, spec=KVSpec(1, 1, 4, 4, block_size=4)), Streaming(sinks=4, window=10))
    for count in range(1, 200):
        worker.append(1)
        seen = worker.tokens()[:4] + worker.tokens()[-10:]
        assert set(range(min(4, count))) | set(range(max(0, count - 10), count)) == set(seen)


def test_ragged_chunks_never_take_another_block() -> None:
    worker = Worker(Desk(blocks=100), CHAT)
    blocks = sorted(worker.lease.table.tolist())
    for count in [1, 900, 130, 17, 1020, 5, 3000, 64, 16, 16, 2047, 1, 784]:
        worker.append(count)
        assert sorted(worker.lease.table.tolist()) == blocks
        assert worker.tokens() == worker.told_positions()
        window = worker.tokens()[-min(1020, worker.position) :]
        assert window == list(range(worker.position - len(window), worker.position))


@settings(max_examples=150, deadline=None)
@given(
    policy=st.builds(Streaming, sinks=st.integers(0, 9), window=st.integers(1, 20)),
    block_size=st.sampled_from([1, 2, 4, 8]),
    chunks=st.lists(st.integers(0, 70), max_size=12),
)
def test_any_chunks_leave_sinks_and_window_where_the_contract_says(policy, block_size, chunks) -> None:
    worker = Worker(Desk(blocks=60, spec=KVSpec(1, 1, 4, 4, block_size=block_size)), policy)
    blocks = sorted(worker.lease.table.tolist())
    for count in chunks:
        worker.append(count)
        assert sorted(worker.lease.table.tolist()) == blocks
        assert worker.tokens() == worker.told_positions()
        sinks = min(policy.sinks, worker.position)
        assert worker.tokens()[:sinks] == list(range(sinks))
        window = min(policy.window, worker.position)
        told = worker.tokens()[:sinks] + worker.tokens()[-window:]
        assert set(range(worker.position - window, worker.position)) <= set(told)
        worker.desk.device.check()


def test_a_prompt_longer_than_sinks_and_window_keeps_its_head_and_its_tail() -> None:
    desk = Desk(blocks=100)
    lease = desk.lease(5000, CHAT)
    change = desk.device.extend("ann", [(desk.progress(lease), 5000)], 0).leases[0]
    ring = 65 * 16
    assert (lease.length, lease.position) == (0, 5000 - 16 - ring)
    assert change.skip_after == 16  # the sink block's tokens, then the last ring-full


def test_recycling_fences_the_lease_and_the_blocks_but_growth_does_not() -> None:
    worker = Worker(Desk(blocks=20, spec=KVSpec(1, 1, 4, 4, block_size=4)), Streaming(sinks=4, window=8))
    worker.append(16)
    assert worker.lease.generation == 1
    oldest = int(worker.lease.table[1])
    before = int(worker.desk.pool.blocks.generation[oldest])
    worker.append(1)
    assert worker.lease.generation == 2
    assert worker.lease.table.tolist()[-1] == oldest
    assert worker.desk.pool.blocks.generation[oldest] == before + 1


def test_a_streaming_lease_shares_no_prefix_seals_nothing_and_keeps_its_blocks() -> None:
    desk = Desk()
    lease = desk.prefill(40, Streaming(sinks=4, window=30))
    with pytest.raises(e.InvalidArgumentError, match="cannot be sealed"):
        desk.seal(lease, desk.names(1))
    with pytest.raises(e.InvalidArgumentError, match="until it is released"):
        desk.device.release_blocks("ann", desk.progress(lease), [int(lease.table[-1])])
    donor = desk.prefill(16)
    desk.seal(donor, desk.names(1))
    with pytest.raises(e.InvalidArgumentError, match="can share no prefix"):
        desk.lease(0, Streaming(), prefix_hashes=desk.names(1))


def test_a_streaming_lease_needs_no_compression() -> None:
    desk = Desk()
    lease = desk.prefill(60, Streaming(sinks=4, window=30))
    assert isinstance(desk.compress(lease), Unchanged)
    with pytest.raises(e.InvalidArgumentError, match="prunes itself"):
        desk.compress(lease, SnapKV(window=8), QUERIES)
