"""KeyDiff's kernels against the float64 oracle."""

import numpy as np
import pytest
from tests.kernels.leases import DTYPES, Lease, Shape, make_lease

from kvd_cuda import reference
from kvd_cuda.dtypes import FloatArray
from kvd_cuda.gpu.device_lease import Columns
from kvd_cuda.gpu.launch_keydiff import Distinctness, distinctness, segments_of
from kvd_cuda.gpu.scores import SEGMENT

from .simulated import SimulatedDevice

HALF_UNIT = 2.0**-24  # of float32 below 1: the only rounding


def scored(lease: Lease, columns: Columns) -> FloatArray:
    """float32 [layers, heads, length]."""
    device = SimulatedDevice(2 << 20)
    device_lease = device.put_lease(lease.planes)
    length, head_dim = lease.planes.length, lease.planes.head_dim_k
    room = Distinctness(
        scales=device.room(columns.count * length, np.float64),
        parts=device.room(columns.count * segments_of(device_lease) * head_dim, np.float64),
        anchors=device.room(columns.count * head_dim, np.float64),
        scores=device.room(columns.count * length),
    )
    device.run(distinctness(device_lease, columns, room))
    return device.get(room.scores, (columns.layers, columns.heads, length))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_as_distinct_as_the_oracle_finds_them(dtype) -> None:
    lease = make_lease(np.random.default_rng(1), Shape(length=77, head_dim_k=20, dtype=dtype))
    right = np.stack([reference.distinctness(keys) for keys in lease.keys])
    np.testing.assert_allclose(scored(lease, Columns(0, 2, 0, 2)), right, rtol=0, atol=HALF_UNIT)
    np.testing.assert_allclose(scored(lease, Columns(1, 1, 1, 1))[0, 0], right[1, 1], rtol=0, atol=HALF_UNIT)


def test_segments_are_added_up() -> None:
    shape = Shape(layers=1, kv_heads=1, length=SEGMENT + 60, head_dim_k=8, head_dim_v=8)
    lease = make_lease(np.random.default_rng(2), shape)
    right = reference.distinctness(lease.keys[0])
    np.testing.assert_allclose(scored(lease, Columns(0, 1, 0, 1))[0], right, rtol=0, atol=HALF_UNIT)


def test_a_key_of_no_length_is_neither_like_nor_unlike_the_others() -> None:
    lease = make_lease(np.random.default_rng(3), Shape(layers=1, kv_heads=1, length=40))
    lease.planes.k[0][lease.planes.block_table[1], 3] = 0
    assert scored(lease, Columns(0, 1, 0, 1))[0, 0, 19] == 0
