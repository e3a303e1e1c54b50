"""The scoring kernels, both paths, against the float64 oracle on the same rounded inputs."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tests.kernels.leases import Lease, Shape, make_lease, make_queries, query_values

from kvd_cuda import reference
from kvd_cuda.dtypes import Array, FloatArray
from kvd_cuda.gpu.device_lease import Columns, DeviceLease, DeviceQueries
from kvd_cuda.gpu.launch_scores import runs_on_tensor_cores
from kvd_cuda.gpu.scores import SEGMENT
from kvd_cuda.queries import WindowQueries

from .simulated import SimulatedDevice, whole_window

CLOSE = 4e-6  # relative: float32 dots of standard normal elements, two exponentials
FULL_ATTENTION = 1e-5  # how far a row's attention may be from 1


@dataclass(frozen=True)
class Case:
    """A lease and its window's queries, on the host and on the device."""

    lease: Lease
    queries: WindowQueries
    device: SimulatedDevice
    device_lease: DeviceLease
    device_queries: DeviceQueries

    def scored(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        return self.device.score(whole_window(self.device_lease, self.device_queries))

    @property
    def weights(self) -> list[Array]:
        """The oracle's attention per layer."""
        return [
            reference.attention_weights(query_values(self.queries, layer), keys)
            for layer, keys in enumerate(self.lease.keys)
        ]


def make_case(shape: Shape, window: int, query_dtype: str | None = None, memory: int = 1 << 20) -> Case:
    rng = np.random.default_rng(shape.length + window)
    lease = make_lease(rng, shape)
    queries = make_queries(rng, shape, window, query_dtype)
    device = SimulatedDevice(memory)
    return Case(lease, queries, device, device.put_lease(lease.planes), device.put_queries(queries))


def check(case: Case) -> None:
    sums, peaks, errors = case.scored()
    kv_heads = case.device_lease.kv_heads
    group = case.device_queries.query_heads // kv_heads
    right = np.stack([reference.votes(w, kv_heads, "mean") * group for w in case.weights])
    np.testing.assert_allclose(sums, right, rtol=CLOSE, atol=1e-9)
    highest = np.stack([reference.votes(w, kv_heads, "max") for w in case.weights])
    np.testing.assert_allclose(peaks, highest, rtol=CLOSE, atol=1e-9)
    assert errors.max() < FULL_ATTENTION


@pytest.mark.parametrize(
    ("keys", "queries"),
    [
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float16"),
        ("float8_e4m3fn", "float16"),
    ],
)
def test_scalar_scores_are_the_oracles(keys, queries) -> None:
    case = make_case(Shape(group=3, head_dim_k=48, length=75, dtype=keys), 5, queries)
    assert not runs_on_tensor_cores(case.device_lease, case.device_queries)
    check(case)


TENSOR_SHAPES = [
    pytest.param(Shape(head_dim_k=64, group=4, length=203, dtype="bfloat16"), 7, id="bf16, one row tile"),
    pytest.param(Shape(head_dim_k=64, group=1, length=17, dtype="bfloat16"), 17, id="the window is all"),
    pytest.param(Shape(head_dim_k=64, group=7, length=90, block_size=5, dtype="bfloat16"), 1, id="one token"),
    pytest.param(Shape(head_dim_k=80, group=2, length=130, dtype="float16"), 67, id="fp16, two row tiles"),
    pytest.param(
        Shape(layers=1, kv_heads=1, head_dim_k=64, group=1, length=141, dtype="bfloat16"),
        128,
        id="the longest",
    ),
    pytest.param(Shape(head_dim_k=128, group=2, length=70, dtype="float8_e4m3fn"), 9, id="fp8"),
    pytest.param(
        Shape(layers=3, head_dim_k=64, group=2, length=66, dtype="bfloat16", layout="layer-outermost"),
        33,
        id="layers",
    ),
]


@pytest.mark.parametrize(("shape", "window"), TENSOR_SHAPES)
def test_tensor_core_scores_are_the_oracles(shape, window) -> None:
    case = make_case(shape, window)
    assert runs_on_tensor_cores(case.device_lease, case.device_queries)
    check(case)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(96, "bfloat16"), (112, "float8_e4m3fn"), (192, "float16"), (256, "float8_e4m3fn"), (256, "bfloat16")],
)
def test_every_head_dim_is_scored_on_tensor_cores_and_on_ordinary_ones(head_dim, dtype) -> None:
    shape = Shape(layers=1, kv_heads=1, head_dim_k=head_dim, head_dim_v=8, length=37, dtype=dtype)
    case = make_case(shape, 3)
    assert runs_on_tensor_cores(case.device_lease, case.device_queries)
    check(case)
    check(make_case(shape, 3, "float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_leases_longer_than_a_segment_are_joined(dtype) -> None:
    shape = Shape(
        layers=1, kv_heads=1, group=2, head_dim_k=64, head_dim_v=16, length=SEGMENT + 70, dtype=dtype
    )
    check(make_case(shape, 3, memory=2 << 20))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_given_log_sum_exps_skip_a_pass_and_change_nothing(dtype) -> None:
    case = make_case(Shape(head_dim_k=64, group=4, length=100, dtype=dtype), 6)
    lse = np.stack(
        [reference.row_lse(query_values(case.queries, i), keys) for i, keys in enumerate(case.lease.keys)]
    )
    queries = WindowQueries(case.queries.values, case.queries.dtype, lse.astype(np.float32))
    check(replace(case, device_queries=case.device.put_queries(queries)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_nan_keys_and_wrong_log_sum_exps_are_told(dtype) -> None:
    case = make_case(
        Shape(layers=1, head_dim_k=64 if dtype != "float8_e4m3fn" else 128, length=60, dtype=dtype), 4
    )
    wrong = np.full((1, 4, 4), 2.0, np.float32)
    queries = WindowQueries(case.queries.values, case.queries.dtype, wrong)
    told = replace(case, device_queries=case.device.put_queries(queries))
    assert told.scored()[2].min() > 0.05
    plane = case.lease.planes.k[0]
    plane[case.lease.planes.block_table[1], 3, 1] = np.array(-1).astype(np.int64).astype(plane.dtype)
    if dtype == "float32":
        plane[case.lease.planes.block_table[1], 3, 1] = np.nan
    again = replace(case, device_lease=case.device.put_lease(case.lease.planes))
    errors = again.scored()[2][0]
    assert errors[0] < FULL_ATTENTION
    assert errors[1] == np.inf


def test_unaligned_pools_are_scored_by_the_scalar_kernels() -> None:
    case = make_case(
        Shape(head_dim_k=64, head_dim_v=4, block_size=1, kv_heads=1, length=40, dtype="bfloat16"), 4
    )
    assert case.device_lease.k.alignment < 16
    assert not runs_on_tensor_cores(case.device_lease, case.device_queries)
    check(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_columns_scored_apart_are_those_scored_together(dtype) -> None:
    shape = Shape(layers=2, kv_heads=3, head_dim_k=64, group=2, length=70, dtype=dtype)
    case = make_case(shape, 5)
    whole, apart = case.scored(), Columns(1, 1, 1, 2)
    queries = replace(case.device_queries, values=case.device.put(case.queries.values[1:].copy()))
    scoring = whole_window(case.device_lease, queries)
    parts = case.device.score(replace(scoring, columns=apart))
    for mine, all_of_them in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(mine[0], all_of_them[1, 1:])


def test_runs_are_bit_identical() -> None:
    case = make_case(Shape(head_dim_k=64, group=4, length=150, dtype="bfloat16"), 8)
    first, second = case.scored(), case.scored()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
