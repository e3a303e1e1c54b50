"""Compaction, rotation, accumulation, block copies: bytes end up exactly where the host backend puts them."""

from dataclasses import replace

import numpy as np
import pytest
from tests.kernels.leases import Lease, Shape, make_lease, make_queries, query_values

from kvd_cuda import reference
from kvd_cuda.dtypes import from_float32, to_float32
from kvd_cuda.gpu.device_lease import Columns
from kvd_cuda.gpu.launch_moves import (
    Blocks,
    Compaction,
    Rotation,
    accumulate,
    compact,
    copy_blocks,
    rotate,
    scrub_blocks,
    word_bytes,
)
from kvd_cuda.gpu.launch_scores import Scoring
from kvd_cuda.host import HostBackend

from .simulated import SimulatedDevice, ids

rng = np.random.default_rng(7)


def random_kept(shape: Shape, count: int):
    choices = [np.sort(rng.permutation(shape.length)[:count]) for _ in range(shape.layers * shape.kv_heads)]
    return ids(choices).reshape(shape.layers, shape.kv_heads, count)


def with_sidecar(lease: Lease) -> Lease:
    """Some positions explicit, some scores observed."""
    planes = lease.planes
    planes.positions[...] = rng.integers(0, 10**6, planes.positions.shape)
    planes.scores[...] = rng.random(planes.scores.shape)
    return lease.with_planes(
        replace(planes, position=planes.length + 1000, compressed_length=20, observed_length=30)
    )


MOVES = [
    pytest.param(Shape(length=203, head_dim_k=64, dtype="bfloat16"), 16, id="bf16"),
    pytest.param(Shape(length=100, head_dim_k=64, head_dim_v=48, dtype="float8_e4m3fn"), 16, id="fp8"),
    pytest.param(Shape(length=60, head_dim_k=6, head_dim_v=6, dtype="float16"), 4, id="words of 4"),
    pytest.param(
        Shape(length=60, head_dim_k=5, head_dim_v=5, kv_heads=3, dtype="float8_e4m3fn"), 1, id="bytes"
    ),
]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("shape", "word"), MOVES)
def test_compaction_is_the_host_backends(shape, word, in_place) -> None:
    count = shape.length * 2 // 3
    state = rng.bit_generator.state
    lease = with_sidecar(make_lease(rng, shape))
    kept = random_kept(shape, count)
    needed = -(-count // shape.block_size)
    goal = lease.planes.block_table[:needed] if in_place else lease.free[:needed]
    device = SimulatedDevice()
    device_lease = device.put_lease(lease.planes)
    assert word_bytes(device_lease.k.alignment, lease.planes.k[0].itemsize * shape.head_dim_k) == word
    places = {"goal": device.put(goal), "kept": device.put(kept)}
    move = Compaction(columns=device_lease.columns, count=count, in_place=in_place, **places)
    device.run(compact(device_lease, move))
    device.fetch()
    rng.bit_generator.state = state
    twin = with_sidecar(make_lease(rng, shape))
    HostBackend().compact(twin.planes, kept, goal)
    same_bytes(lease, twin)


def same_bytes(lease: Lease, twin: Lease) -> None:
    for mine, theirs in zip(
        (*lease.planes.k, *lease.planes.v), (*twin.planes.k, *twin.planes.v), strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()
    assert lease.planes.positions.tobytes() == twin.planes.positions.tobytes()
    assert lease.planes.scores.tobytes() == twin.planes.scores.tobytes()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_keys_of_every_size_are_compacted_in_the_widest_words(head_dim, dtype) -> None:
    shape = Shape(length=50, kv_heads=1, head_dim_k=head_dim, head_dim_v=head_dim, dtype=dtype)
    state = rng.bit_generator.state
    lease = with_sidecar(make_lease(rng, shape))
    kept, goal = random_kept(shape, 40), lease.planes.block_table[:3]
    device = SimulatedDevice()
    device_lease = device.put_lease(lease.planes)
    assert word_bytes(device_lease.k.alignment, lease.planes.k[0].itemsize * head_dim) == 16
    places = {"goal": device.put(goal), "kept": device.put(kept)}
    move = Compaction(columns=device_lease.columns, count=40, in_place=True, **places)
    device.run(compact(device_lease, move))
    device.fetch()
    rng.bit_generator.state = state
    twin = with_sidecar(make_lease(rng, shape))
    HostBackend().compact(twin.planes, kept, goal)
    same_bytes(lease, twin)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_keys_of_every_size_are_rotated(head_dim) -> None:
    lease = make_lease(rng, Shape(layers=1, length=20, head_dim_k=head_dim, dtype="bfloat16"))
    planes, slots, inv_freq = lease.planes, ids([0, 3, 17]), 0.9 ** np.arange(head_dim / 2)
    turns = np.stack([np.cos(7 * inv_freq), np.sin(7 * inv_freq)], axis=1)
    device = SimulatedDevice()
    device_lease = device.put_lease(planes)
    places = {"slots": device.put(slots), "turns": device.put(turns)}
    rotation = Rotation(slot_count=3, pairs=head_dim // 2, style="half", **places)
    device.run(rotate(device_lease, device_lease.columns, rotation))
    device.fetch()
    right = lease.keys[0].copy()
    turned = reference.rotate(right[slots], 7, inv_freq, "half").astype(np.float32)
    right[slots] = to_float32(from_float32(turned, "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(lease.stored_keys(planes, 0), right)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("from_originals", [False, True])
def test_rotation_is_the_oracles_rounded_once(style, dtype, from_originals) -> None:
    lease = make_lease(rng, Shape(length=50, head_dim_k=20, dtype=dtype))
    planes = lease.planes
    slots, inv_freq = ids([0, 3, 17]), 0.3 ** np.arange(7.0)
    turns = np.stack([np.cos(123 * inv_freq), np.sin(123 * inv_freq)], axis=1)
    sources = [keys[slots] for keys in lease.keys]
    device = SimulatedDevice()
    device_lease = device.put_lease(planes)
    originals = 0
    if from_originals:
        sources = [to_float32(from_float32(keys * 2, dtype), dtype) for keys in sources]
        places = [device.put(from_float32(keys, dtype)) for keys in sources]
        originals = device.put(np.array(places, np.uint64))
    rotation = Rotation(
        slots=device.put(slots),
        slot_count=3,
        turns=device.put(turns),
        pairs=7,
        style=style,
        originals=originals,
    )
    device.run(rotate(device_lease, device_lease.columns, rotation))
    device.fetch()
    for layer, source in enumerate(sources):
        found = lease.stored_keys(planes, layer)
        right = lease.keys[layer].copy()
        turned = reference.rotate(source, 123, inv_freq, style).astype(np.float32)
        right[slots] = to_float32(from_float32(turned, dtype), dtype)
        np.testing.assert_array_equal(found, right)


def test_observed_attention_is_added_to_what_was_observed_before() -> None:
    shape = Shape(length=90, head_dim_k=16, group=2)
    lease = make_lease(rng, shape)
    planes = replace(lease.planes, observed_length=70)
    slots = np.arange(70)
    before = rng.random((70, 2, 2), dtype=np.float32)
    planes.scores[planes.block_table[slots // 16], :, :, slots % 16] = before
    queries = make_queries(rng, shape, 20)
    device = SimulatedDevice()
    device_lease, device_queries = device.put_lease(planes), device.put_queries(queries)
    observed = 70
    for start, stop in ((0, 13), (13, 20)):
        end = shape.length - 20 + stop
        given = {"lease": device_lease, "columns": device_lease.columns, "queries": device_queries}
        scoring = Scoring(start=start, stop=stop, end=end, **given)
        sums, _, _ = device.score(scoring)
        columns = device_lease.columns
        device.run(accumulate(device_lease, columns, (end, observed), device.put(sums)))
        observed = max(observed, end)
    device.fetch()
    planes = replace(planes, observed_length=90)
    for layer, keys in enumerate(lease.keys):
        right = reference.accumulate(query_values(queries, layer), keys)
        right[:, :70] += before[:, layer].T
        for head in range(2):
            np.testing.assert_allclose(planes.slot_scores(layer, head), right[head], rtol=1e-5)


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 6), ("float8_e4m3fn", 5)])
def test_blocks_are_copied_and_scrubbed_and_others_left_alone(dtype, head_dim) -> None:
    shape = Shape(length=60, head_dim_k=head_dim, head_dim_v=head_dim, dtype=dtype)
    lease = make_lease(rng, shape)
    planes = lease.planes
    device = SimulatedDevice()
    device_lease = device.put_lease(planes)
    size = planes.k[0][0].nbytes
    pool = Blocks(
        bases=device_lease.k.bases,
        planes=shape.layers,
        block_bytes=size,
        stride=device_lease.k.block_bytes,
        alignment=device_lease.k.alignment,
    )
    right = [plane.copy() for plane in planes.k]
    sources, goals = planes.block_table[:3], lease.free[:3]
    device.run(copy_blocks(pool, device.put(sources), device.put(goals), 3))
    device.run(scrub_blocks(pool, device.put(sources[:2].copy()), 2, 0x7FC07FC0))
    device.fetch()
    for plane, expected in zip(planes.k, right, strict=True):
        expected[goals] = expected[sources]
        pattern = np.full(size // 4, 0x7FC07FC0, np.uint32)
        expected[sources[:2]] = pattern.view(expected.dtype).reshape(expected[0].shape)
        assert plane.tobytes() == expected.tobytes()


def test_columns_compacted_one_after_the_other_are_those_compacted_together() -> None:
    shape = Shape(length=90, kv_heads=3, head_dim_k=8, head_dim_v=16, dtype="float16")
    state = rng.bit_generator.state
    lease = with_sidecar(make_lease(rng, shape))
    kept = random_kept(shape, 60)
    goal = lease.planes.block_table[:4]
    device = SimulatedDevice()
    device_lease = device.put_lease(lease.planes)
    for columns in (Columns(0, 1, 0, 3), Columns(1, 1, 0, 1), Columns(1, 1, 1, 2)):
        part = kept[columns.layer, columns.head : columns.head + columns.heads].copy()
        places = {"goal": device.put(goal), "kept": device.put(part)}
        move = Compaction(columns=columns, count=60, in_place=True, **places)
        device.run(compact(device_lease, move))
    device.fetch()
    rng.bit_generator.state = state
    twin = with_sidecar(make_lease(rng, shape))
    HostBackend().compact(twin.planes, kept, goal)
    same_bytes(lease, twin)
