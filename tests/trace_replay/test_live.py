"""A trace against a real kvd: blocks are found where the orders say, with their bytes."""

import pytest
from tests.running_kvd import running_kvd
from trace_replay import live, orders
from trace_replay.made_up import made_up
from trace_replay.requests import accesses, bound

CAPACITY = 400  # blocks; above the longest prompt


@pytest.mark.parametrize("order", ["2q", "lru"])
def test_one_worker_finds_what_the_order_finds_without_a_daemon(tmp_path, order) -> None:
    part = made_up(3, ticks=12)
    with running_kvd(tmp_path, "--eviction", order) as kvd:
        measured = live.replay(kvd.run_dir, part, CAPACITY, workers=1, speed=0)
    assert measured.found_blocks == orders.found_blocks(part, CAPACITY, order)
    assert {name: len(calls) for name, calls in measured.calls.items()} == dict.fromkeys(
        ("Match", "Lease", "Seal", "Release"), len(part)
    )


def test_several_workers_find_all_that_was_there_before_where_nothing_is_evicted(tmp_path) -> None:
    part = made_up(3, ticks=12)
    with running_kvd(tmp_path) as kvd:
        measured = live.replay(kvd.run_dir, part, 10_000, workers=3, speed=100)
    known = round(bound(part) * accesses(part))
    assert (
        0.9 * known <= measured.found_blocks <= known
    )  # those served at the same time do not find each other
