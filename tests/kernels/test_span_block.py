"""Span by block: ids leave the table, no byte moves."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import reference
from kvd_cuda.compress import CompressPlan, CompressResult, compress
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.queries import WindowQueries

from .leases import DTYPES, LAYOUTS, Lease, Shape, make_lease, make_queries
from .oracle import CLEAR_GAP, pooled_votes

PLAN = CompressPlan(
    method="span_block", target_tokens=96, window=10, sinks=4, kernel=21, pooling="max", reduce="max"
)
BACKEND = HostBackend()


def expected_blocks(lease: Lease, plan: CompressPlan, queries: WindowQueries) -> tuple[list[int], float]:
    """Kept block indices and the relative gap at the cut."""
    length, block_size = lease.planes.length, lease.planes.block_size
    ranks = reference.block_ranks(pooled_votes(lease, plan, queries), length, block_size)
    window_start = length - queries.count
    always = {slot // block_size for slot in (*range(plan.sinks), *range(window_start, length))}
    budget = -(-plan.target_tokens // block_size)
    others = np.array([rank for block, rank in enumerate(ranks) if block not in always])
    gap = reference.gap_at_cut(others, budget - len(always))
    return reference.keep_blocks(ranks, budget, always), gap


def run(lease: Lease, plan: CompressPlan, queries: WindowQueries) -> CompressResult:
    return compress(BACKEND, lease.planes, plan, queries)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [200, 208, 333])
def test_the_kept_blocks_are_the_oracles(length: int, dtype: str, layout: str) -> None:
    rng = np.random.default_rng(length)
    shape = Shape(length=length, dtype=dtype, layout=layout, group=3)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 10)
    blocks, gap = expected_blocks(lease, PLAN, queries)
    result = run(lease, PLAN, queries)
    assert gap > CLEAR_GAP
    assert result.kept_block_indices is not None
    assert result.kept_block_indices.tolist() == blocks
    assert result.planes.block_table.tolist() == lease.planes.block_table[blocks].tolist()


def test_kv_bytes_stay_and_every_kept_slot_says_its_position() -> None:
    rng = np.random.default_rng(1)
    shape = Shape(length=205)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 10)
    result = run(lease, PLAN, queries)
    assert result.kept_block_indices is not None
    slots = [s for b in result.kept_block_indices for s in range(b * 16, min(b * 16 + 16, 205))]
    assert result.kept_length == len(slots) == result.planes.compressed_length
    for layer, head in np.ndindex(2, 2):
        assert result.planes.slot_positions(layer, head).tolist() == slots
    for layer in range(2):
        np.testing.assert_array_equal(lease.stored_keys(lease.planes, layer), lease.keys[layer])
        np.testing.assert_array_equal(lease.stored_keys(result.planes, layer), lease.keys[layer][slots])


def test_positions_made_explicit_earlier_are_kept_as_they_are() -> None:
    rng = np.random.default_rng(2)
    shape = Shape(length=208)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 10)
    first = run(lease, PLAN, queries).planes
    grown = replace(first, length=first.length, position=first.position)
    smaller = replace(PLAN, target_tokens=64)
    result = compress(BACKEND, grown, smaller, queries)
    assert result.kept_block_indices is not None
    before = first.slot_positions(1, 1).reshape(-1, 16)
    assert (
        result.planes.slot_positions(1, 1).tolist() == before[result.kept_block_indices].reshape(-1).tolist()
    )


def test_the_reported_mass_is_what_the_kept_blocks_hold() -> None:
    rng = np.random.default_rng(3)
    shape = Shape(layers=1, length=240)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 10)
    result = run(lease, PLAN, queries)
    weights = reference.attention_weights(queries.values[0], lease.keys[0])
    mass = reference.mass(weights, shape.kv_heads).mean(axis=0)
    assert result.mass_retained is not None
    assert result.mass_retained[0] == pytest.approx(mass[result.planes.slot_positions(0, 0)].sum(), rel=1e-5)


def test_blocks_of_sinks_and_window_beyond_the_budget_are_refused() -> None:
    rng = np.random.default_rng(4)
    shape = Shape(length=200)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 10)
    with pytest.raises(KernelInputError, match="lie in 3 blocks of 16, more than target_tokens=32"):
        run(lease, replace(PLAN, target_tokens=32), queries)


def test_a_budget_of_everything_keeps_every_block() -> None:
    rng = np.random.default_rng(5)
    shape = Shape(length=90)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 10)
    result = run(lease, PLAN, queries)
    assert result.kept_block_indices is not None
    assert result.kept_block_indices.tolist() == list(range(6))
    assert result.kept_length == 90
