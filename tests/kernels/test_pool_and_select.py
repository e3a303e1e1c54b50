"""Pooling and the choice of the top slots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_cuda import reference
from kvd_cuda.compress import CompressPlan
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend

BACKEND = HostBackend()


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("kernel", range(1, 32, 2))
@pytest.mark.parametrize("length", [1, 2, 15, 100])
def test_pooling_is_the_oracles_for_every_odd_kernel(length: int, kernel: int, kind: str) -> None:
    votes = np.random.default_rng(kernel).random((3, length), dtype=np.float32)
    expected = reference.pool(votes.astype(np.float64), kernel, kind).astype(np.float32)
    np.testing.assert_array_equal(BACKEND.pool(votes, kernel, kind), expected)


@pytest.mark.parametrize("kernel", [-1, 0, 2, 6, 257])
def test_an_even_or_absurd_kernel_is_refused_with_a_good_one(kernel: int) -> None:
    with pytest.raises(
        KernelInputError, match=f"kernel={kernel}; pooling needs an odd width .* such as 5 or 7"
    ):
        BACKEND.pool(np.ones((1, 9), np.float32), kernel, "avg")
    with pytest.raises(KernelInputError, match="odd width"):
        CompressPlan(method="snapkv", target_tokens=9, kernel=kernel)


def test_an_unknown_pooling_reduction_or_method_is_refused() -> None:
    for wrong in ({"pooling": "sum"}, {"reduce": "median"}, {"method": "magic"}):
        with pytest.raises(KernelInputError, match="use one of"):
            CompressPlan(**{"method": "snapkv", "target_tokens": 9, **wrong})


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(st.integers(0, 6), min_size=1, max_size=60), data=st.data())
def test_the_largest_are_selected_and_ties_go_to_the_lower_index(
    scores: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(scores)))
    row = np.array(scores, np.float32)
    rows = np.stack([row, row[::-1]])
    chosen = BACKEND.select(rows, count)
    assert chosen.dtype == np.int32
    assert chosen[0].tolist() == reference.top(row.astype(np.float64), count)
    assert chosen[1].tolist() == reference.top(row[::-1].astype(np.float64), count)


def test_more_slots_than_there_are_cannot_be_selected() -> None:
    with pytest.raises(KernelInputError, match="10 of 9 slots wanted; lower target_tokens"):
        BACKEND.select(np.ones((1, 9), np.float32), 10)
