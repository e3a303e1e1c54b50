"""Queries of the past under the mean rotation of what comes."""

import numpy as np
import pytest
import torch

from kvd.errors import InvalidArgumentError
from kvd_client import future_queries
from kvd_cuda import reference

INV_FREQ = 10_000.0 ** -(np.arange(4) / 4)  # of 8 rotary elements; the other 4 are not rotated


def asked(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((2, count, 3, 12)).astype(np.float32)


def test_each_is_the_mean_of_what_it_would_be_at_every_position_to_come() -> None:
    raw = asked(np.random.default_rng(0), 5)
    positions = np.array([7, 8, 20, 21, 40])
    rotated = [reference.rotate(raw[:, i], p, INV_FREQ, "half") for i, p in enumerate(positions)]
    post = torch.from_numpy(np.stack(rotated, axis=1))
    moved = future_queries(post, positions, torch.from_numpy(INV_FREQ), 41, ahead=10)
    expected = np.mean([reference.rotate(raw, place, INV_FREQ, "half") for place in range(41, 51)], axis=0)
    np.testing.assert_allclose(moved, expected, atol=1e-5)
    np.testing.assert_array_equal(moved[..., 8:], raw[..., 8:])


def test_what_came_in_stays_as_it_was() -> None:
    queries = asked(np.random.default_rng(1), 3)
    before = queries.copy()
    future_queries(queries, [0, 1, 2], INV_FREQ, 3)
    np.testing.assert_array_equal(queries, before)


@pytest.mark.parametrize(
    ("positions", "inv_freq", "position"),
    [
        ([0, 1], INV_FREQ, 3),
        ([0, 1, 2], np.ones(7), 3),
        ([0, 1, 2], np.ones(0), 3),
        ([0, 1, 2], INV_FREQ, -1),
    ],
)
def test_what_does_not_fit_together_is_refused(positions, inv_freq, position) -> None:
    with pytest.raises(InvalidArgumentError):
        future_queries(asked(np.random.default_rng(2), 3), positions, inv_freq, position)
