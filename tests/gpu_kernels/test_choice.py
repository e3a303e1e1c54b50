"""Pooling, ranking and selection against the oracle."""

import numpy as np
import pytest
from tests.kernels.leases import Shape, make_lease

from kvd_cuda import reference
from kvd_cuda.gpu.device_lease import Columns
from kvd_cuda.gpu.launch_choice import Pooling, block_masses, mass, pool, rank_blocks, rank_tokens, select
from kvd_cuda.gpu.launch_moves import gather_scores
from kvd_cuda.gpu.selection import THREADS, SelectShape

from .simulated import SimulatedDevice

rng = np.random.default_rng(5)


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(("scored", "width"), [(300, 5), (11, 31), (256, 1)])
def test_votes_are_folded_and_pooled(kind, scored, width) -> None:
    votes = rng.random((3, scored + 7), dtype=np.float32)
    pooling = Pooling(rows=3, length=scored + 7, scored=scored, kernel=width, kind=kind, scale=0.25)
    device = SimulatedDevice()
    pooled = device.room(3 * scored)
    device.run(pool(pooling, device.put(votes), pooled))
    right = reference.pool(votes[:, :scored].astype(np.float64) / 4, width, kind)
    np.testing.assert_allclose(device.get(pooled, (3, scored)), right, rtol=1e-7)


def test_blocks_rank_as_their_best_token_and_columns_may_come_in_parts() -> None:
    lease = make_lease(rng, Shape(length=203, head_dim_k=4, head_dim_v=4))
    pooled = rng.random((4, 190), dtype=np.float32)
    device = SimulatedDevice()
    device_lease = device.put_lease(lease.planes)
    ranks, block_ranks = device.room(190, np.float64), device.room(13)
    for rows in (slice(0, 1), slice(1, 4)):
        part = pooled[rows].copy()
        pooling = Pooling(rows=len(part), length=203, scored=190, kernel=5, kind="max", scale=1)
        device.run(rank_tokens(pooling, device.put(part), ranks, begun=rows.start > 0))
    device.run(rank_blocks(device_lease, 190, ranks, block_ranks))
    right = reference.block_ranks([pooled.astype(np.float64)], 203, 16)
    np.testing.assert_allclose(device.get(block_ranks, (13,)), right, rtol=1e-7)


def test_the_attention_to_whole_blocks_is_added_up_over_heads() -> None:
    lease = make_lease(rng, Shape(layers=3, length=75, head_dim_k=4, head_dim_v=4))
    sums = rng.random((2, 2, 75), dtype=np.float32)
    device = SimulatedDevice()
    device_lease, masses = device.put_lease(lease.planes), device.room(2 * 5, np.float64)
    device.run(block_masses(device_lease, Columns(1, 2, 0, 2), device.put(sums), masses))
    by_slot = sums.astype(np.float64).sum(axis=1)
    right = np.add.reduceat(by_slot, np.arange(0, 75, 16), axis=1)
    np.testing.assert_allclose(device.get(masses, (2, 5), np.float64), right, rtol=1e-12)


def selected(scores, shape: SelectShape):
    device = SimulatedDevice()
    kept = device.room(len(scores) * shape.kept, np.int32)
    device.run(select(len(scores), shape, device.put(scores), kept))
    return device.get(kept, (len(scores), shape.kept), np.int32)


def right_choice(scores, shape: SelectShape):
    candidates = scores[:, : shape.stop].astype(np.float64)
    return [reference.keep_top(row, shape.length, shape.kept, shape.first) for row in candidates]


@pytest.mark.parametrize("levels", [3, 50, 10**6])
@pytest.mark.parametrize("candidates", [40, THREADS, 2 * THREADS + 333])
def test_the_largest_are_kept_and_ties_go_to_the_lower_index(levels, candidates) -> None:
    scores = rng.integers(0, levels, (2, 4 + candidates + 9)).astype(np.float32) / levels
    length = candidates + 12
    for chosen in (0, 1, candidates // 3, candidates):
        shape = SelectShape(scores.shape[1], 4, 4 + candidates, length, 4 + chosen + length - 4 - candidates)
        np.testing.assert_array_equal(selected(scores, shape), right_choice(scores, shape))


def test_infinite_negative_and_zero_scores_have_their_places() -> None:
    scores = np.array([[0.0, -0.0, -1, np.inf, -np.inf, 1e-40, -1e-40, 5]], np.float32)
    for kept in range(9):
        shape = SelectShape(8, 0, 8, 8, kept)
        assert selected(scores, shape).tolist() == [reference.top(scores[0].astype(np.float64), kept)]


def test_mass_is_what_the_kept_slots_hold() -> None:
    values = rng.random((3, 400), dtype=np.float32)
    kept = np.sort(rng.permuted(np.tile(np.arange(400), (3, 1)), axis=1)[:, :300], axis=1).astype(np.int32)
    device = SimulatedDevice()
    masses = device.room(3, np.float64)
    device.run(mass(3, (400, 300), (device.put(values), device.put(kept), masses)))
    right = np.take_along_axis(values.astype(np.float64), kept, axis=1).sum(axis=1)
    np.testing.assert_allclose(device.get(masses, (3,), np.float64), right, rtol=1e-12)
    device.run(mass(3, (400, 300), (device.put(values), 0, masses)))
    right = values[:, :300].sum(axis=1, dtype=np.float64)
    np.testing.assert_allclose(device.get(masses, (3,), np.float64), right, rtol=1e-12)


def test_accumulated_scores_are_gathered_in_slot_order() -> None:
    lease = make_lease(rng, Shape(length=75, head_dim_k=4, head_dim_v=4))
    observed = rng.random((2, 2, 75), dtype=np.float32)
    observed[:, :, 60:] = 0
    planes = lease.planes
    slots = np.arange(60)
    planes.scores[planes.block_table[slots // 16], :, :, slots % 16] = observed.transpose(2, 0, 1)[:60]
    object.__setattr__(planes, "observed_length", 60)
    device = SimulatedDevice()
    device_lease, dense = device.put_lease(planes), device.room(observed.size)
    device.run(gather_scores(device_lease, device_lease.columns, dense))
    np.testing.assert_array_equal(device.get(dense, observed.shape), observed)
    device.run(gather_scores(device_lease, Columns(1, 1, 1, 1), dense))
    np.testing.assert_array_equal(device.get(dense, (75,)), observed[1, 1])
