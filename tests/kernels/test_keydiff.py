"""KeyDiff on its own: what the matrix of all methods cannot see."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import host_keydiff, reference
from kvd_cuda.compress import CompressPlan, compress
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend

from .leases import Shape, make_lease

PLAN = CompressPlan(method="keydiff", target_tokens=32, window=8, sinks=2)


def test_a_key_that_points_elsewhere_stays_and_the_many_alike_go() -> None:
    shape = Shape(layers=1, kv_heads=1, head_dim_k=8, length=160)
    lease = make_lease(np.random.default_rng(0), shape)
    planes = lease.planes
    odd = [37, 90, 101]
    for slot in range(shape.length):
        block, offset = planes.block_table[slot // shape.block_size], slot % shape.block_size
        planes.k[0][block, offset, 0] = np.eye(8)[1 if slot in odd else 0] * (1 + slot)  # length says nothing
    kept = compress(HostBackend(), planes, PLAN).planes.slot_positions(0, 0).tolist()
    assert set(odd) <= set(kept)
    assert kept[:2] == [0, 1]
    assert kept[-8:] == list(range(152, 160))


def test_scores_are_those_of_the_paper_whatever_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(layers=1, kv_heads=2, head_dim_k=24, length=501)
    lease = make_lease(np.random.default_rng(1), shape)
    expected = reference.distinctness(lease.keys[0])
    for tile in (4096, 500, 64, 1):
        monkeypatch.setattr(host_keydiff, "TILE", tile)
        for head in range(2):
            scores = host_keydiff.distinctness(lease.planes, 0, head)
            np.testing.assert_allclose(scores, expected[head], atol=1e-6)


def test_keys_without_length_are_scored_zero() -> None:
    shape = Shape(layers=1, kv_heads=1, head_dim_k=8, length=64)
    lease = make_lease(np.random.default_rng(2), shape)
    for plane in lease.planes.k:
        plane[lease.planes.block_table] = 0
    assert not host_keydiff.distinctness(lease.planes, 0, 0).any()
    kept = compress(HostBackend(), lease.planes, PLAN).planes.slot_positions(0, 0).tolist()
    assert kept == [*range(24), *range(56, 64)]  # ties go to the lower slot


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_that_are_no_numbers_are_refused_and_nothing_moves(bad: float) -> None:
    shape = Shape(length=100)
    lease = make_lease(np.random.default_rng(3), shape)
    lease.planes.k[1][lease.planes.block_table[2], 3, 1, 0] = bad
    before = [plane.copy() for plane in (*lease.planes.k, *lease.planes.v)]
    with pytest.raises(KernelInputError, match="check what was written"):
        compress(HostBackend(), lease.planes, PLAN)
    for plane, old in zip((*lease.planes.k, *lease.planes.v), before, strict=True):
        np.testing.assert_array_equal(plane, old)


def test_it_says_that_a_step_is_done_after_each_head() -> None:
    steps: list[int] = []
    shape = Shape(layers=2, kv_heads=3, length=100)
    lease = make_lease(np.random.default_rng(4), shape)
    HostBackend(on_step=lambda: steps.append(1)).distinct_tokens(lease.planes, replace(PLAN), 8)
    assert len(steps) == 6
