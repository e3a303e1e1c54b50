"""Votes and mass: close to the oracle, the same bits however the work is cut, and within the workspace."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import reference
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.host_scoring import WindowScores
from kvd_cuda.planes import HeadRange
from kvd_cuda.queries import WindowQueries

from .leases import DTYPES, Lease, Shape, make_lease, make_queries, query_values

WORKSPACE_LIMIT = 40_000_000  # bytes


def scores_of(
    backend: HostBackend, lease: Lease, queries: WindowQueries, reduce: str = "mean"
) -> list[WindowScores]:
    return [backend.score_window(lease.planes, queries, h, reduce) for h in backend.head_ranges(lease.planes)]


def stacked(scores: list[WindowScores]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([s.votes for s in scores]), np.concatenate([s.mass for s in scores])


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [5, 16, 511, 512, 513, 1700])
def test_votes_and_mass_are_the_oracles_to_float32(length: int, dtype: str, reduce: str) -> None:
    rng = np.random.default_rng(length)
    shape = Shape(layers=1, length=length, dtype=dtype, head_dim_k=64)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 5)
    (scored,) = scores_of(HostBackend(), lease, queries, reduce)
    weights = reference.attention_weights(query_values(queries, 0), lease.keys[0])
    np.testing.assert_allclose(scored.votes, reference.votes(weights, shape.kv_heads, reduce), rtol=4e-6)
    np.testing.assert_allclose(scored.mass, reference.mass(weights, shape.kv_heads), rtol=4e-6)
    np.testing.assert_allclose(scored.mass.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_no_bit_depends_on_how_the_work_is_cut(group: int, reduce: str) -> None:
    rng = np.random.default_rng(group)
    shape = Shape(layers=1, length=9000, group=group, dtype="bfloat16", head_dim_k=128)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 32)
    whole = stacked(scores_of(HostBackend(), lease, queries, reduce))
    for workspace_bytes in (0, 5_800_000, 7_000_000, 12_000_000):
        cut = stacked(scores_of(HostBackend(workspace_bytes), lease, queries, reduce))
        np.testing.assert_array_equal(cut[0], whole[0])
        np.testing.assert_array_equal(cut[1], whole[1])


def test_a_second_run_gives_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    shape = Shape(length=1300, group=4)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 32)
    backend = HostBackend()
    first, second = (stacked(scores_of(backend, lease, queries)) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_the_block_table_and_layout_change_no_bit() -> None:
    shape = Shape(length=700)
    results = []
    for layout, seed in (("block-outermost", 1), ("layer-outermost", 2)):
        lease = make_lease(np.random.default_rng(seed), replace(shape, layout=layout))
        rng = np.random.default_rng(9)
        for layer in range(shape.layers):
            keys = rng.standard_normal((700, shape.kv_heads, shape.head_dim_k), dtype=np.float32)
            table, where = lease.planes.block_table, np.arange(700)
            lease.planes.k[layer][table[where // 16], where % 16] = keys
        results.append(stacked(scores_of(HostBackend(), lease, make_queries(rng, shape, 8))))
    np.testing.assert_array_equal(results[0][0], results[1][0])


def with_lse(lease: Lease, queries: WindowQueries, error: float = 0.0) -> WindowQueries:
    rows = [
        reference.row_lse(query_values(queries, layer), lease.keys[layer])
        for layer in range(lease.planes.layers)
    ]
    return replace(queries, row_lse=(np.stack(rows) + error).astype(np.float32))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_rows_with_their_log_sum_exp_score_alike(reduce: str) -> None:
    rng = np.random.default_rng(2)
    shape = Shape(length=1100, group=4)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 8)
    plain = stacked(scores_of(HostBackend(), lease, queries, reduce))
    helped = stacked(scores_of(HostBackend(), lease, with_lse(lease, queries), reduce))
    np.testing.assert_allclose(helped[0], plain[0], rtol=3e-6)
    np.testing.assert_allclose(helped[1], plain[1], rtol=3e-6)


@pytest.mark.parametrize("error", [0.2, -0.2, 1e4, -1e4, np.nan])
def test_a_log_sum_exp_of_other_rows_is_refused(error: float) -> None:
    rng = np.random.default_rng(2)
    shape = Shape(length=600)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 8)
    with pytest.raises(KernelInputError, match="row_lse is not that of these queries"):
        scores_of(HostBackend(), lease, with_lse(lease, queries, error))


@pytest.mark.parametrize("helped", [False, True], ids=["two passes", "with lse"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFFC00001, 0x7FFFFFFF, 0x7F800000])
def test_nan_or_infinity_in_one_key_is_refused(bits: int, helped: bool) -> None:
    rng = np.random.default_rng(3)
    shape = Shape(length=600)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 8)
    if helped:
        queries = with_lse(lease, queries)
    planes = lease.planes
    planes.k[0].view(np.uint32)[planes.block_table[20], 3, 1, 7] = bits
    with pytest.raises(KernelInputError, match="NaN or infinite"):
        scores_of(HostBackend(), lease, queries)


def test_nan_in_a_query_is_refused() -> None:
    rng = np.random.default_rng(3)
    shape = Shape(length=100)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 8)
    queries.values[1, 2, 3, 4] = np.nan
    with pytest.raises(KernelInputError, match="queries hold NaN or infinity"):
        scores_of(HostBackend(), lease, queries)


def test_large_scores_neither_overflow_nor_lose_the_heaviest_token() -> None:
    rng = np.random.default_rng(4)
    shape = Shape(layers=1, length=900)
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 4)
    queries.values[:] *= 300
    weights = reference.attention_weights(query_values(queries, 0), lease.keys[0])
    (scored,) = scores_of(HostBackend(), lease, queries)
    np.testing.assert_allclose(scored.mass, reference.mass(weights, shape.kv_heads), atol=1e-4)


@pytest.mark.parametrize(
    ("queries", "why"),
    [
        ((2, 8, 4, 16), "head_dim 16"),
        ((1, 8, 4, 32), "1 layers"),
        ((2, 8, 5, 32), "no multiple of 2 kv heads"),
        ((2, 101, 4, 32), "101 queries for 100 tokens"),
    ],
)
def test_queries_of_another_shape_are_refused(queries: tuple[int, ...], why: str) -> None:
    lease = make_lease(np.random.default_rng(0), Shape(length=100))
    wrong = WindowQueries(np.zeros(queries, np.float32), "float32")
    with pytest.raises(KernelInputError, match=why):
        HostBackend().score_window(lease.planes, wrong, HeadRange(0, 0, 1), "mean")


def test_fp8_queries_are_refused() -> None:
    with pytest.raises(KernelInputError, match="send one of float32, float16, bfloat16"):
        WindowQueries(np.zeros((1, 1, 1, 8), np.uint8), "float8_e4m3fn")


@pytest.mark.parametrize("length", [4_096, 131_072])
def test_the_workspace_stays_under_its_limit(length: int) -> None:
    rng = np.random.default_rng(5)
    shape = Shape(layers=1, kv_heads=2, group=4, head_dim_k=16, head_dim_v=8, length=length, dtype="bfloat16")
    lease, queries = make_lease(rng, shape), make_queries(rng, shape, 32)
    scores_of(HostBackend(), make_lease(rng, replace(shape, length=600)), queries, "max")  # compile first
    tracemalloc.start()
    backend = HostBackend()
    for heads in backend.head_ranges(lease.planes):
        scored = backend.score_window(lease.planes, queries, heads, "max")
        backend.select(backend.pool(scored.votes, 5, "avg"), length // 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < WORKSPACE_LIMIT
