"""What goes wrong with compressed caches in the field, as far as kernels can see it."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda.backend import TokenSelection
from kvd_cuda.compress import CompressPlan, apply, compress, select
from kvd_cuda.dtypes import Array, from_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries

from .leases import Shape, make_lease, make_queries, normal, write_slots

BACKEND = HostBackend()
SNAPKV = CompressPlan(method="snapkv", target_tokens=64, window=16)


def append(planes: KVPlanes, table: Array, k: Array, v: Array) -> KVPlanes:
    """One layer's lease after the worker wrote `k` and `v` [count, kv_heads, head_dim]."""
    write_slots(planes.k[0], table, planes.length, k)
    write_slots(planes.v[0], table, planes.length, v)
    count = len(k)
    return replace(planes, block_table=table, length=planes.length + count, position=planes.position + count)


def test_kept_slots_are_one_set_per_kv_head_not_per_query_head() -> None:
    rng = np.random.default_rng(0)
    shape = Shape(kv_heads=2, group=8)
    lease = make_lease(rng, shape)
    selection = select(BACKEND, lease.planes, SNAPKV, make_queries(rng, shape, 16))
    assert isinstance(selection, TokenSelection)
    assert selection.kept.shape == (2, 2, 64)


def test_choosing_moves_nothing_until_it_is_applied() -> None:
    rng = np.random.default_rng(1)
    lease = make_lease(rng, Shape())
    selection = select(BACKEND, lease.planes, SNAPKV, make_queries(rng, Shape(), 16))
    np.testing.assert_array_equal(lease.stored_keys(lease.planes, 0), lease.keys[0])
    assert apply(BACKEND, lease.planes, SNAPKV, selection).kept_length == 64


def test_a_prompt_shorter_than_the_window_with_a_smaller_budget_is_refused() -> None:
    rng = np.random.default_rng(2)
    shape = Shape(length=17)
    lease = make_lease(rng, shape)
    plan = CompressPlan(method="snapkv", target_tokens=9, window=64)
    with pytest.raises(KernelInputError, match="window=17; keep at least 17 tokens or shorten the window"):
        compress(BACKEND, lease.planes, plan, make_queries(rng, shape, 17))


def test_more_queries_than_the_window_leave_the_vote_to_the_newest() -> None:
    rng = np.random.default_rng(3)
    lease, queries = make_lease(rng, Shape()), make_queries(rng, Shape(), 40)
    plan = replace(SNAPKV, destination_table=lease.free[:4])
    many = compress(BACKEND, lease.planes, plan, queries).planes.slot_positions(0, 0)
    few = compress(BACKEND, lease.planes, plan, queries.part(24, 40)).planes.slot_positions(0, 0)
    assert many.tolist() == few.tolist()


def test_voting_methods_without_queries_or_window_say_what_they_need() -> None:
    lease = make_lease(np.random.default_rng(4), Shape())
    with pytest.raises(KernelInputError, match="snapkv needs the window's queries"):
        compress(BACKEND, lease.planes, SNAPKV)
    queries = make_queries(np.random.default_rng(4), Shape(), 4)
    with pytest.raises(KernelInputError, match="a window of at least one token"):
        compress(BACKEND, lease.planes, replace(SNAPKV, window=0), queries)


@pytest.mark.parametrize("method", ["h2o", "keydiff", "streaming"])
def test_the_bound_holds_for_ten_thousand_generated_tokens_cut_once_a_block(method: str) -> None:
    rng = np.random.default_rng(5)
    shape = Shape(layers=1, kv_heads=1, group=1, head_dim_k=8, head_dim_v=8, length=64, dtype="bfloat16")
    lease = make_lease(rng, shape, spare_blocks=1)
    table, planes, plan = (
        lease.planes.block_table,
        lease.planes,
        CompressPlan(method=method, target_tokens=64, sinks=4, window=30),
    )
    for _ in range(10_000 // 16):
        planes = append(
            planes, table, normal(rng, (16, 1, 8), "bfloat16"), normal(rng, (16, 1, 8), "bfloat16")
        )
        if method == "h2o":
            BACKEND.observe(planes, make_queries(rng, shape, 16))
            planes = replace(planes, observed_length=planes.length)
        planes = compress(BACKEND, planes, plan).planes
        assert planes.block_table.size == 4
    positions = planes.slot_positions(0, 0)
    assert planes.position == 64 + 10_000
    assert positions[:4].tolist() == [0, 1, 2, 3]
    assert positions[-30:].tolist() == list(range(planes.position - 30, planes.position))
    assert (np.diff(positions) > 0).all()


def test_a_needle_survives_eviction_between_prefill_chunks() -> None:
    rng = np.random.default_rng(6)
    shape = Shape(layers=1, kv_heads=1, group=2, length=160)
    lease = make_lease(rng, shape, spare_blocks=10)
    planes, table, needle = lease.planes, lease.planes.block_table, 37
    cue = rng.standard_normal(32).astype(np.float32) * 3
    write_slots(planes.k[0], table, needle, cue[None, None])
    needle_value = lease.values[0][needle, 0]
    asking = WindowQueries(np.broadcast_to(cue, (1, 16, 2, 32)).copy(), "float32")
    for _ in range(4):
        planes = compress(BACKEND, planes, SNAPKV, asking).planes
        chunk = normal(rng, (80, 1, 32), "float32")
        planes = append(planes, table, chunk, normal(rng, (80, 1, 32), "float32"))
    positions = planes.slot_positions(0, 0).tolist()
    assert needle in positions
    slot = positions.index(needle)
    np.testing.assert_array_equal(lease.stored_values(planes, 0)[slot, 0], needle_value)
    assert positions == sorted(set(positions))
    assert positions[-1] == planes.position - 1


def test_a_trim_after_compression_keeps_true_positions() -> None:
    rng = np.random.default_rng(7)
    lease = make_lease(rng, Shape())
    planes = compress(BACKEND, lease.planes, SNAPKV, make_queries(rng, Shape(), 16)).planes
    whole = planes.slot_positions(1, 0)
    trimmed = replace(planes, length=50, compressed_length=50, observed_length=0)
    assert trimmed.slot_positions(1, 0).tolist() == whole[:50].tolist()


def test_a_sharer_of_the_source_blocks_is_untouched_by_compression_out_of_place() -> None:
    rng = np.random.default_rng(8)
    lease = make_lease(rng, Shape())
    plan = replace(SNAPKV, destination_table=lease.free[:4], sinks=4)
    sharer = replace(lease.planes, length=150, position=150)
    compress(BACKEND, lease.planes, plan, make_queries(rng, Shape(), 16))
    np.testing.assert_array_equal(lease.stored_keys(sharer, 1), lease.keys[1][:150])
    assert sharer.slot_positions(0, 0).tolist() == list(range(150))


def test_poison_in_freed_blocks_reaches_no_result() -> None:
    rng = np.random.default_rng(9)
    lease = make_lease(rng, Shape(dtype="bfloat16"), spare_blocks=4)
    planes = compress(BACKEND, lease.planes, SNAPKV, make_queries(rng, Shape(dtype="bfloat16"), 16)).planes
    freed = [b for b in lease.planes.block_table if b not in planes.block_table]
    for plane in (*planes.k, *planes.v):
        plane[freed] = from_float32(np.full((), np.nan, np.float32), "bfloat16")
    smaller = replace(SNAPKV, target_tokens=32)
    result = compress(BACKEND, planes, smaller, make_queries(rng, Shape(dtype="bfloat16"), 16))
    assert np.isfinite(lease.stored_keys(result.planes, 0)).all()
    assert result.mass_retained is not None
    assert np.isfinite(result.mass_retained).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"length": 300}, "do not fit"),
        ({"position": 100}, "do not fit"),
        ({"compressed_length": 201}, "compressed_length and observed_length"),
        ({"block_table": np.array([1, 99], np.int32)}, "ids in"),
        ({"dtype": "bfloat16"}, "uint16"),
        ({"positions": np.zeros((1, 1, 1, 1), np.int32)}, "must have the shape"),
    ],
)
def test_planes_that_do_not_fit_together_are_refused(change: dict[str, object], why: str) -> None:
    lease = make_lease(np.random.default_rng(10), Shape())
    with pytest.raises(KernelInputError, match=why):
        replace(lease.planes, **change)
