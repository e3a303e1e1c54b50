"""Storage of KV dtypes, against torch's."""

import numpy as np
import pytest
import torch

from kvd_cuda.dtypes import FP8_TABLE, STORAGE, from_float32, storage_of, to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host_kernels import gather_bfloat16, widen_by_table, widen_float16

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
BITS = {1: np.uint8, 2: np.uint16}


def every_code(dtype: str) -> np.ndarray:
    item = STORAGE[dtype].itemsize
    return np.arange(256**item, dtype=np.uint32).astype(BITS[item])


def by_torch(codes: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(codes.copy()).view(TORCH[dtype]).to(torch.float32).numpy()


@pytest.mark.parametrize("dtype", TORCH)
def test_every_stored_code_reads_as_torch_reads_it(dtype: str) -> None:
    codes = every_code(dtype)
    np.testing.assert_array_equal(to_float32(codes.view(STORAGE[dtype]), dtype), by_torch(codes, dtype))


@pytest.mark.parametrize("dtype", TORCH)
def test_the_compiled_loops_widen_every_code_as_torch_does(dtype: str) -> None:
    codes = every_code(dtype)
    values = np.empty(codes.size, np.float32)
    if dtype == "bfloat16":
        gather_bfloat16(codes, np.array([0]), values.view(np.uint32)[None])
    elif dtype == "float16":
        widen_float16(codes, values)
    else:
        widen_by_table(codes, FP8_TABLE, values)
    np.testing.assert_array_equal(values, by_torch(codes, dtype))


@pytest.mark.parametrize("dtype", TORCH)
def test_values_round_to_nearest_even_as_torch_rounds(dtype: str) -> None:
    rng = np.random.default_rng(0)
    finite = to_float32(every_code(dtype).view(STORAGE[dtype]), dtype)
    finite = np.unique(finite[np.isfinite(finite)])
    halfway = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    values = np.concatenate([finite, halfway, rng.normal(0, 100, 5000)]).astype(np.float32)
    values = np.clip(values, finite[0], finite[-1])
    expected = torch.from_numpy(values).to(TORCH[dtype]).to(torch.float32).numpy()
    np.testing.assert_array_equal(to_float32(from_float32(values, dtype), dtype), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_nan_stays_nan(dtype: str) -> None:
    values = np.array([np.nan, -np.nan], np.float32)
    assert np.isnan(to_float32(from_float32(values, dtype), dtype)).all()


def test_an_fp8_value_out_of_range_saturates() -> None:
    values = np.array([1e6, -np.inf], np.float32)
    assert to_float32(from_float32(values, "float8_e4m3fn"), "float8_e4m3fn").tolist() == [448.0, -448.0]


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KernelInputError, match="use one of float32, float16, bfloat16, float8_e4m3fn"):
        storage_of("int4")
