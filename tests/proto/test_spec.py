"""Where keys and values lie, checked against index arithmetic by numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kvd.errors import InvalidArgumentError
from kvd.spec import DTYPE_BYTES, LAYOUTS, MAX_BLOCK_SIZE, MAX_HEAD_DIM, MAX_LAYERS, KVSpec, Plane

specs = st.builds(
    KVSpec,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim_k=st.integers(1, 5),
    head_dim_v=st.integers(1, 5),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    block_size=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
)
block_counts = st.integers(1, 6)


def model(spec: KVSpec, layer: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Element numbers of a layer's K and V, [blocks, block_size, kv_heads, head_dim], by reshaping."""
    rows = spec.block_size * spec.kv_heads
    k_size, v_size = rows * spec.head_dim_k, rows * spec.head_dim_v
    elements = np.arange(blocks * spec.layers * (k_size + v_size))
    if spec.layout == "block_outermost":
        of_layer = elements.reshape(blocks, spec.layers, k_size + v_size)[:, layer]
        k, v = of_layer[:, :k_size], of_layer[:, k_size:]
    else:
        of_layer = elements.reshape(spec.layers, blocks * (k_size + v_size))[layer]
        k, v = of_layer[: blocks * k_size], of_layer[blocks * k_size :]
    axes = blocks, spec.block_size, spec.kv_heads
    return k.reshape(*axes, spec.head_dim_k), v.reshape(*axes, spec.head_dim_v)


def view(spec: KVSpec, plane: Plane, blocks: int) -> np.ndarray:
    """The elements a worker would see through the plane."""
    size = spec.element_bytes
    elements = np.arange(spec.pool_bytes(blocks) // size)
    item = elements.itemsize
    strides = (plane.block_stride_bytes // size, spec.kv_heads * plane.head_dim, plane.head_dim, 1)
    shape = (blocks, spec.block_size, spec.kv_heads, plane.head_dim)
    return as_strided(elements[plane.offset_bytes // size :], shape, [item * step for step in strides])


@settings(max_examples=150)
@given(specs, block_counts)
def test_planes_are_what_the_layout_says(spec, blocks) -> None:
    for layer in range(spec.layers):
        for plane, expected in zip(spec.planes(layer, blocks), model(spec, layer, blocks), strict=True):
            assert (view(spec, plane, blocks) == expected).all()


@settings(max_examples=80)
@given(specs, block_counts)
def test_planes_cover_the_pool_once(spec, blocks) -> None:
    planes = [plane for layer in range(spec.layers) for plane in spec.planes(layer, blocks)]
    seen = np.concatenate([view(spec, plane, blocks).ravel() for plane in planes])
    assert sorted(seen.tolist()) == list(range(spec.pool_bytes(blocks) // spec.element_bytes))


@settings(max_examples=80)
@given(specs, block_counts, st.data())
def test_a_blocks_segments_are_its_bytes_in_all_planes(spec, blocks, data) -> None:
    block = data.draw(st.integers(0, blocks - 1))
    size = spec.element_bytes
    listed = [
        element
        for offset, count in spec.block_segments(block, blocks)
        for element in range(offset // size, (offset + count) // size)
    ]
    expected = [
        element
        for layer in range(spec.layers)
        for plane in model(spec, layer, blocks)
        for element in plane[block].ravel().tolist()
    ]
    assert listed == expected
    assert sum(count for _, count in spec.block_segments(block, blocks)) == spec.block_bytes


def test_a_block_is_one_byte_range_when_blocks_are_outermost() -> None:
    spec = KVSpec(4, 2, 8, 8)
    assert spec.block_segments(3, 10) == [(3 * spec.block_bytes, spec.block_bytes)]


def test_bytes_follow_from_the_shape() -> None:
    spec = KVSpec(layers=2, kv_heads=4, head_dim_k=64, head_dim_v=32, dtype="bf16", block_size=16)
    assert spec.token_bytes == 2 * 4 * 96 * 2
    assert spec.block_bytes == 16 * spec.token_bytes
    assert spec.pool_bytes(11) == 11 * spec.block_bytes
    assert spec.sidecar_bytes(11) == 11 * 2 * 4 * 16 * 8
    assert [spec.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


@given(specs, specs)
def test_fingerprints_are_equal_exactly_for_equal_geometries(one, other) -> None:
    assert (one.fingerprint() == other.fingerprint()) == (one == other)
    assert bool(one.differing_fields(other)) == (one != other)


def test_an_alias_of_a_dtype_is_the_dtype() -> None:
    assert KVSpec(1, 1, 1, 1, dtype="bf16") == KVSpec(1, 1, 1, 1, dtype="bfloat16")
    assert KVSpec(1, 1, 1, 1, dtype="fp8").element_bytes == 1


def test_differing_fields_are_named_with_both_values() -> None:
    one, other = KVSpec(2, 2, 8, 8), KVSpec(2, 2, 8, 16, layout="layer_outermost")
    assert one.differing_fields(other) == {
        "head_dim_v": (8, 16),
        "layout": ("block_outermost", "layer_outermost"),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", MAX_LAYERS + 1),
        ("kv_heads", -1),
        ("head_dim_k", MAX_HEAD_DIM + 1),
        ("head_dim_v", 0),
        ("block_size", MAX_BLOCK_SIZE + 1),
        ("block_size", 1.5),
        ("dtype", "int3"),
        ("layout", "token_outermost"),
        ("backend", "x" * 65),
    ],
)
def test_a_geometry_outside_the_limits_is_refused_by_name(field, value) -> None:
    fields = {"layers": 1, "kv_heads": 1, "head_dim_k": 1, "head_dim_v": 1} | {field: value}
    with pytest.raises(InvalidArgumentError, match=field.split("_")[0]):
        KVSpec(**fields)
