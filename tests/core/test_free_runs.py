"""Free blocks are runs: few, long, and found without looking at the pool."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_daemon.core import ids_of, runs_of
from kvd_daemon.core.free_runs import FreeRuns

BLOCKS = 40


def blocks_of(runs: list[tuple[int, int]]) -> list[int]:
    return [block for start, count in runs for block in range(start, start + count)]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, BLOCKS), st.randoms())))
def test_taken_and_free_blocks_are_all_blocks_and_free_neighbours_are_one_run(steps) -> None:
    free_runs, taken = FreeRuns(1, BLOCKS), []
    for takes, count, chance in steps:
        if takes:
            taken += blocks_of(free_runs.take(min(count, free_runs.count)))
        else:
            chance.shuffle(taken)
            back, taken = sorted(taken[:count]), taken[count:]
            free_runs.give([(block, 1) for block in back])
        free = blocks_of(list(free_runs.runs()))
        assert sorted(free + taken) == list(range(1, BLOCKS + 1))
        assert free_runs.count == len(free)
        starts = {start for start, _ in free_runs.runs()}
        assert not starts & {start + count for start, count in free_runs.runs()}


def test_one_run_is_taken_where_one_is_long_enough() -> None:
    free_runs = FreeRuns(1, 100)
    free_runs.take(100)
    free_runs.give([(1, 3), (10, 5), (20, 16), (50, 2)])
    assert free_runs.take(8) == [(20, 8)]


def test_the_longest_runs_are_taken_first_where_none_is_long_enough() -> None:
    free_runs = FreeRuns(1, 100)
    free_runs.take(100)
    free_runs.give([(1, 4), (10, 9), (50, 1)])
    assert free_runs.take(12) == [(10, 9), (1, 3)]


def test_a_returned_run_melts_with_both_neighbours() -> None:
    free_runs = FreeRuns(1, 30)
    first, second, third = free_runs.take(10), free_runs.take(10), free_runs.take(10)
    free_runs.give(first)
    free_runs.give(third)
    assert len(list(free_runs.runs())) == 2
    free_runs.give(second)
    assert list(free_runs.runs()) == [(1, 30)]


@given(st.lists(st.integers(1, 60), max_size=80, unique=True))
def test_ids_become_runs_and_ids_again(ids) -> None:
    array = ids_of([(block, 1) for block in ids])
    runs = runs_of(array)
    assert ids_of(runs).tolist() == ids
    assert array.dtype == ids_of(runs).dtype == np.int32  # the kernel worker takes no other
    assert all(start + count != after for (start, count), (after, _) in pairwise(runs))
