"""The matrix every method joins: every dtype, layout and many shapes, against the float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import reference
from kvd_cuda.compress import CompressPlan, CompressResult, compress
from kvd_cuda.dtypes import to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.queries import WindowQueries

from .leases import DTYPES, LAYOUTS, Lease, Shape, make_lease, make_queries
from .oracle import KeptRow, expected_rows

METHODS = {
    "snapkv": CompressPlan(method="snapkv", target_tokens=64, window=16),
    "snapkv max 7": CompressPlan(method="snapkv", target_tokens=64, window=16, kernel=7, pooling="max"),
    "dual": CompressPlan(method="snapkv", target_tokens=64, window=16, sinks=4),
    "span": CompressPlan(
        method="span", target_tokens=80, window=16, sinks=4, kernel=21, pooling="max", reduce="max"
    ),
    "h2o": CompressPlan(method="h2o", target_tokens=64, window=20, sinks=4),
    "keydiff": CompressPlan(method="keydiff", target_tokens=64, window=20, sinks=4),
    "expected": CompressPlan(method="expected", target_tokens=64, window=16, sinks=4),
    "streaming": CompressPlan(method="streaming", target_tokens=64, sinks=4),
}
BACKEND = HostBackend()


def run(lease: Lease, plan: CompressPlan, queries: WindowQueries) -> CompressResult:
    """Compress as a daemon would: H2O has observed its queries before, the others bring them."""
    planes = lease.planes
    if plan.method != "h2o":
        return compress(BACKEND, planes, plan, queries)
    BACKEND.observe(planes, queries)
    return compress(BACKEND, replace(planes, observed_length=planes.length), plan)


def assert_kept(lease: Lease, result: CompressResult, rows: dict[tuple[int, int], KeptRow]) -> int:
    """Every clear row lies in the pool as the oracle says, K, V and positions; returns their number."""
    planes = result.planes
    clear = [(place, row) for place, row in rows.items() if row.is_clear]
    for (layer, head), row in clear:
        assert planes.slot_positions(layer, head).tolist() == row.slots
        np.testing.assert_array_equal(
            lease.stored_keys(planes, layer)[:, head], lease.keys[layer][row.slots, head]
        )
        np.testing.assert_array_equal(
            lease.stored_values(planes, layer)[:, head], lease.values[layer][row.slots, head]
        )
    return len(clear)


def needed_queries(plan: CompressPlan, shape: Shape) -> int:
    return shape.length if plan.method == "h2o" else max(1, min(plan.window, shape.length))


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "out of place"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_what_stays_is_what_the_oracle_keeps(method: str, dtype: str, layout: str, in_place: bool) -> None:
    rng = np.random.default_rng(1)
    shape = Shape(dtype=dtype, layout=layout, head_dim_v=48, length=203)
    lease, plan = make_lease(rng, shape), METHODS[method]
    if not in_place:
        plan = replace(plan, destination_table=lease.free[: plan.target_tokens // shape.block_size])
    queries = make_queries(rng, shape, needed_queries(plan, shape))
    rows = expected_rows(lease, plan, queries)
    result = run(lease, plan, queries)
    assert result.kept_length == plan.target_tokens
    assert assert_kept(lease, result, rows) >= len(rows) - 1


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("method", METHODS)
def test_random_shapes_keep_what_the_oracle_keeps(method: str, group: int) -> None:
    rng = np.random.default_rng(group)
    for _ in range(4):
        shape = Shape(
            layers=int(rng.integers(1, 3)),
            kv_heads=int(rng.integers(1, 4)),
            group=group,
            head_dim_k=int(rng.choice([8, 24, 64, 128])),
            head_dim_v=int(rng.choice([8, 40])),
            block_size=int(rng.choice([1, 8, 16, 32])),
            length=int(rng.integers(90, 700)),
            dtype=str(rng.choice(DTYPES)),
            layout=str(rng.choice(LAYOUTS)),
        )
        lease = make_lease(rng, shape)
        plan = replace(METHODS[method], target_tokens=int(rng.integers(40, 90)))
        queries = make_queries(rng, shape, needed_queries(plan, shape))
        rows = expected_rows(lease, plan, queries)
        assert assert_kept(lease, run(lease, plan, queries), rows) >= len(rows) - 1


@pytest.mark.parametrize("method", METHODS)
def test_attention_over_the_compacted_lease_is_attention_over_the_kept_tokens(method: str) -> None:
    rng = np.random.default_rng(3)
    shape = Shape(dtype="bfloat16", length=231, head_dim_v=16)
    lease, plan = make_lease(rng, shape), METHODS[method]
    queries = make_queries(rng, shape, needed_queries(plan, shape))
    result = run(lease, plan, queries)
    asked = to_float32(queries.values[:, -3:], queries.dtype)
    for layer in range(shape.layers):
        kept = np.stack([result.planes.slot_positions(layer, head) for head in range(shape.kv_heads)])
        keys = reference.compacted(lease.keys[layer], kept)
        values = reference.compacted(lease.values[layer], kept)
        stored = lease.stored_keys(result.planes, layer), lease.stored_values(result.planes, layer)
        np.testing.assert_allclose(
            reference.attend(asked[layer], *stored),
            reference.attend(asked[layer], keys, values),
            rtol=1e-6,
        )


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("streaming", "keydiff")])
def test_the_reported_mass_is_the_attention_the_kept_tokens_hold(method: str) -> None:
    rng = np.random.default_rng(4)
    shape = Shape(length=300, group=4)
    lease, plan = make_lease(rng, shape), METHODS[method]
    queries = make_queries(rng, shape, needed_queries(plan, shape))
    rows = expected_rows(lease, plan, queries)
    result = run(lease, plan, queries)
    assert result.mass_retained is not None
    for layer in range(shape.layers):
        mean = np.mean([rows[layer, head].mass for head in range(shape.kv_heads)])
        assert result.mass_retained[layer] == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_that_holds_the_whole_lease_changes_nothing(method: str) -> None:
    rng = np.random.default_rng(5)
    shape = Shape(length=60)
    lease = make_lease(rng, shape)
    result = run(lease, METHODS[method], make_queries(rng, shape, 16))
    assert result.kept_length == 60
    assert result.planes.compressed_length == 0
    np.testing.assert_array_equal(lease.stored_keys(lease.planes, 1), lease.keys[1])


@pytest.mark.parametrize("method", METHODS)
def test_no_byte_outside_the_lease_and_its_destination_is_touched(method: str) -> None:
    rng = np.random.default_rng(6)
    shape = Shape(dtype="bfloat16", length=203)
    lease, plan = make_lease(rng, shape), METHODS[method]
    count = plan.target_tokens // shape.block_size
    plan = replace(plan, destination_table=lease.free[:count])
    run(lease, plan, make_queries(rng, shape, needed_queries(plan, shape)))
    others = [0, *lease.free[count:].tolist()]
    for plane in (*lease.planes.k, *lease.planes.v):
        assert np.isnan(to_float32(plane[others], "bfloat16")).all()
    assert (lease.planes.positions[others] == -9).all()
    np.testing.assert_array_equal(lease.stored_keys(lease.planes, 0), lease.keys[0])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "streaming"])
def test_sinks_and_window_beyond_the_budget_are_refused_with_the_way_out(method: str) -> None:
    rng = np.random.default_rng(7)
    shape = Shape(length=100)
    lease = make_lease(rng, shape)
    plan = replace(METHODS[method], target_tokens=24, window=21, sinks=4)
    with pytest.raises(KernelInputError, match="keep at least 25 tokens or shorten the window"):
        run(lease, plan, make_queries(rng, shape, needed_queries(plan, shape)))
