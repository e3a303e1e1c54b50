"""What a call costs depends on the blocks asked for, not on the pool; counted, not timed."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest

from kvd.limits import MAX_SCRATCH_RESERVE
from kvd_daemon.core import Device, LeaseWish, Progress, SessionIdentity

from .desk import SPEC

SMALL, LARGE = 2_000, 1_000_000  # blocks
BYTES_PER_BLOCK = 200  # the bound; measured it is far below
CACHED_BYTES = 175  # of a cached block, its name of 32 bytes included; measured 125 to 165
KIB = 1024


def device_of(blocks: int) -> Device:
    device = Device(1 << 60)
    device.create_pool("pool", SPEC, blocks, "id")
    device.open_session(SessionIdentity("ann", "red", 1, 1), 10**18, 0)
    return device


def lines_and_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Lines of Python that ran, and the most memory that was allocated at once."""
    count = 0

    def on_line(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return on_line

    gc.disable()  # or what others do when it collects would be counted too
    tracemalloc.start()
    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return count, peak


def cycle(device: Device, blocks: int) -> None:
    """Lease, extend, release."""
    lease = device.lease("ann", "pool", [LeaseWish(16 * blocks)], 0).leases[0]
    device.extend("ann", [(Progress(lease.lease_id, 1, 16 * blocks, 16 * blocks), 16)], 0)
    device.release("ann", [lease.lease_id])


@pytest.mark.parametrize("blocks", [1, 100, 1000])
def test_lease_extend_and_release_run_the_same_lines_in_a_small_and_a_large_pool(blocks) -> None:
    costs = []
    for total in (SMALL, LARGE):
        device = device_of(total)
        cycle(device, blocks)  # the first one fills caches of imports and tables
        costs.append(lines_and_bytes(lambda device=device: cycle(device, blocks)))
    (lines, peak), (lines_large, peak_large) = costs
    assert lines_large == lines
    assert peak_large <= peak + 4 * KIB


def test_a_run_of_a_thousand_blocks_runs_no_more_lines_than_one_of_a_hundred() -> None:
    device = device_of(LARGE)
    cycle(device, 1000)  # now all of them were written before
    hundred, _ = lines_and_bytes(lambda: cycle(device, 100))
    thousand, _ = lines_and_bytes(lambda: cycle(device, 1000))
    assert thousand == hundred


def test_ten_thousand_leases_do_not_make_another_one_dearer() -> None:
    few, many = device_of(LARGE), device_of(LARGE)
    few.lease("ann", "pool", [LeaseWish(160)] * 10, 0)
    for _ in range(10):
        many.lease("ann", "pool", [LeaseWish(160)] * 1000, 0)
    assert len(many.leases) == 10_000
    cycle(few, 8)
    cycle(many, 8)
    assert lines_and_bytes(lambda: cycle(many, 8))[0] == lines_and_bytes(lambda: cycle(few, 8))[0]


def test_appending_to_a_long_lease_costs_what_is_appended() -> None:
    device = device_of(LARGE)
    long = device.lease("ann", "pool", [LeaseWish(16 * 100_000)], 0).leases[0]

    def extend(length: int) -> None:
        device.extend("ann", [(Progress(long.lease_id, 1, length, length), 16)], 0)

    extend(16 * 100_000)  # the table doubles its room here
    assert lines_and_bytes(lambda: extend(16 * 100_001))[1] < 64 * KIB


def test_a_million_blocks_take_less_than_two_hundred_bytes_each_even_in_single_pieces() -> None:
    tracemalloc.start()
    device = device_of(LARGE)
    whole = tracemalloc.get_traced_memory()[0]
    pool = device.pools["pool"]
    taken = pool.free_runs.take(LARGE)
    assert taken == [(1, LARGE)]
    pool.free_runs.give([(block, 1) for block in range(1, LARGE, 2)])
    pieces = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert whole < 40 * LARGE
    assert pieces < BYTES_PER_BLOCK * LARGE


@pytest.mark.parametrize("blocks", [1_000, 8_200, 11_000, 100_000])
def test_a_cached_block_takes_little_with_its_name_and_its_place_in_the_order(blocks) -> None:
    """Just above a power of two the tables are emptiest; a small pool has the device to itself."""
    run = 100
    random = Random(1)
    tracemalloc.start()
    device = device_of(blocks + MAX_SCRATCH_RESERVE)
    for _ in range(blocks // run):
        lease = device.lease("ann", "pool", [LeaseWish(16 * run)], 0).leases[0]
        hashes = [random.randbytes(32) for _ in range(run)]
        device.seal("ann", Progress(lease.lease_id, 1, 16 * run, 16 * run), hashes)
        device.release("ann", [lease.lease_id])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert device.pools["pool"].counts.cached == blocks
    assert taken < CACHED_BYTES * blocks
