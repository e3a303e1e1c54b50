"""Streaming with cache positions: sink keys move next to the window, once, from what was first stored."""

from dataclasses import replace

import numpy as np
import pytest

from kvd_cuda import reference
from kvd_cuda.compress import CompressPlan, compress
from kvd_cuda.dtypes import from_float32, to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.plan import Rope
from kvd_cuda.planes import KVPlanes

from .leases import Shape, make_lease, normal, write_slots

BACKEND = HostBackend()
INV_FREQ = 10_000.0 ** -(np.arange(12) / 12)  # 24 of 32 elements rotate
STYLES = ("half", "interleaved")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("style", STYLES)
def test_rotated_keys_are_the_oracles_and_the_rest_stays(style: str, dtype: str) -> None:
    shape = Shape(length=70, dtype=dtype)
    lease = make_lease(np.random.default_rng(0), shape)
    slots = np.array([0, 3, 17, 69], np.int32)
    BACKEND.rotate_keys(lease.planes, slots, 1234, Rope(INV_FREQ, style))
    for layer in range(shape.layers):
        expected = lease.keys[layer].copy()
        expected[slots] = reference.rotate(expected[slots], 1234, INV_FREQ, style)
        expected = to_float32(from_float32(expected, dtype), dtype)
        np.testing.assert_allclose(lease.stored_keys(lease.planes, layer), expected, rtol=0.008, atol=1e-6)
        np.testing.assert_array_equal(lease.stored_values(lease.planes, layer), lease.values[layer])


@pytest.mark.parametrize("style", STYLES)
def test_scores_depend_on_the_distance_only(style: str) -> None:
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 32))
    at = lambda x, position: reference.rotate(x, position, INV_FREQ, style)  # noqa: E731
    assert at(query, 100) @ at(key, 90) == pytest.approx(at(query, 5010) @ at(key, 5000), rel=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_attention_is_that_of_a_cache_renumbered_from_zero(style: str) -> None:
    """The reference StreamingLLM re-rotates every key to its cache index; moving S sinks is the same."""
    rng = np.random.default_rng(2)
    shape = Shape(layers=1, length=300, group=1, kv_heads=1)
    lease = make_lease(rng, shape)
    raw = lease.keys[0].copy()
    rotated = np.stack([reference.rotate(raw[s], s, INV_FREQ, style) for s in range(300)])
    write_slots(lease.planes.k[0], lease.planes.block_table, 0, rotated.astype(np.float32))
    plan = CompressPlan(method="streaming", target_tokens=64, sinks=4, rope=Rope(INV_FREQ, style))
    after = compress(BACKEND, lease.planes, plan).planes
    query = rng.standard_normal((1, 1, 32))
    kept = reference.keep_streaming(300, 64, 4)
    renumbered = np.stack([reference.rotate(raw[s], c, INV_FREQ, style) for c, s in enumerate(kept)])
    values = lease.values[0][kept]
    ours = reference.attend(
        reference.rotate(query, 300, INV_FREQ, style), lease.stored_keys(after, 0), values
    )
    theirs = reference.attend(reference.rotate(query, 64, INV_FREQ, style), renumbered, values)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_thousand_recyclings_from_the_originals_round_only_once() -> None:
    rng = np.random.default_rng(3)
    shape = Shape(layers=1, length=48, dtype="bfloat16")
    lease = make_lease(rng, shape, spare_blocks=1)
    originals = [from_float32(lease.keys[0][:4], "bfloat16")]
    plan = CompressPlan(
        method="streaming", target_tokens=48, sinks=4, rope=Rope(INV_FREQ, originals=originals)
    )
    planes = lease.planes
    table = planes.block_table
    for _ in range(1000):
        planes = grown(rng, replace(planes, block_table=table), 1)
        planes = compress(BACKEND, planes, plan).planes
    exact = reference.rotate(lease.keys[0][:4], 1000, INV_FREQ, "half")
    once = to_float32(from_float32(exact.astype(np.float32), "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(lease.stored_keys(planes, 0)[:4], once)
    assert planes.position == 1048


def test_positions_run_past_any_table_without_losing_precision() -> None:
    lease = make_lease(np.random.default_rng(4), Shape(layers=1, length=16))
    BACKEND.rotate_keys(lease.planes, np.arange(16, dtype=np.int32), 3_000_000, Rope(INV_FREQ))
    exact = reference.rotate(lease.keys[0], 3_000_000, INV_FREQ, "half")
    np.testing.assert_allclose(lease.stored_keys(lease.planes, 0), exact, atol=1e-6)


def test_fp8_keys_are_not_rotated_and_nothing_moves() -> None:
    lease = make_lease(np.random.default_rng(5), Shape(length=100, dtype="float8_e4m3fn"))
    plan = CompressPlan(method="streaming", target_tokens=48, sinks=4, rope=Rope(INV_FREQ))
    with pytest.raises(KernelInputError, match=r'fp8 keys cannot be rotated again .* use rope="original"'):
        compress(BACKEND, lease.planes, plan)
    np.testing.assert_array_equal(lease.stored_keys(lease.planes, 0), lease.keys[0])


def test_originals_of_other_sinks_are_refused_before_anything_moves() -> None:
    lease = make_lease(np.random.default_rng(7), Shape(layers=1, length=100))
    for originals in ([], [lease.keys[0][:3]], [lease.keys[0][:4].astype(np.float64)]):
        rope = Rope(INV_FREQ, originals=originals)
        plan = CompressPlan(method="streaming", target_tokens=48, sinks=4, rope=rope)
        with pytest.raises(KernelInputError, match="originals must be"):
            compress(BACKEND, lease.planes, plan)
    np.testing.assert_array_equal(lease.stored_keys(lease.planes, 0), lease.keys[0])


def test_rope_of_another_shape_or_for_another_method_is_refused() -> None:
    lease = make_lease(np.random.default_rng(6), Shape(length=100))
    slots = np.array([0], np.int32)
    for rope in (Rope(np.ones(17)), Rope(np.ones(4, np.float32)), Rope(INV_FREQ, "spiral")):  # type: ignore[arg-type]
        with pytest.raises(KernelInputError):
            BACKEND.rotate_keys(lease.planes, slots, 1, rope)
    with pytest.raises(KernelInputError, match="rope is for streaming"):
        CompressPlan(method="snapkv", target_tokens=48, rope=Rope(INV_FREQ))


def grown(rng: np.random.Generator, planes: KVPlanes, count: int) -> KVPlanes:
    """The lease after `count` more tokens were written."""
    for k, v in zip(planes.k, planes.v, strict=True):
        for plane in (k, v):
            write_slots(
                plane,
                planes.block_table,
                planes.length,
                normal(rng, (count, *plane.shape[2:]), planes.dtype),
            )
    return replace(planes, length=planes.length + count, position=planes.position + count)
