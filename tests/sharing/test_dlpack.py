"""The DLPack export with real consumers, on host memory: numpy and torch."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch

from kvd_client._dlpack import CPU, CUDA, Exported


class Owner:
    """Sixty-four bytes that somebody has mapped."""

    def __init__(self) -> None:
        self.buffer = (ctypes.c_uint8 * 64)(*range(64))


def exported(owner: Owner, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Exported:
    return Exported(ctypes.addressof(owner.buffer), shape, strides, dtype, (CPU, 0), owner)


def test_a_strided_view_has_the_bytes_of_the_memory_and_writes_to_it() -> None:
    owner = Owner()
    tensor = torch.from_dlpack(exported(owner, "uint8", (2, 3, 4), (32, 8, 1)))
    assert tensor.shape == (2, 3, 4)
    assert tensor[1, 2].tolist() == [48, 49, 50, 51]
    tensor[1, 2, 3] = 0
    assert owner.buffer[51] == 0


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", torch.float32),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("uint16", torch.uint16),
    ],
)
def test_every_type_of_a_pool_arrives_as_itself(dtype: str, kind: torch.dtype) -> None:
    assert torch.from_dlpack(exported(Owner(), dtype, (2, 4), (4, 1))).dtype == kind


def test_fp8_arrives_as_bits_that_torch_can_read_as_fp8() -> None:
    view = torch.from_dlpack(exported(Owner(), "uint8", (2, 4), (32, 1))).view(torch.float8_e4m3fn)
    assert view.dtype == torch.float8_e4m3fn
    assert view.stride() == (32, 1)


def test_the_memory_is_held_until_the_last_view_dies() -> None:
    owner = Owner()
    held = weakref.ref(owner)
    array = np.from_dlpack(exported(owner, "uint8", (4,), (1,)))
    view = array[1:]
    del owner, array
    gc.collect()
    assert held() is not None
    assert view.tolist() == [1, 2, 3]
    del view
    gc.collect()
    assert held() is None


def test_a_capsule_that_nobody_takes_holds_nothing() -> None:
    owner = Owner()
    held = weakref.ref(owner)
    capsule = exported(owner, "uint8", (4,), (1,)).__dlpack__()
    del owner
    assert held() is not None
    del capsule
    gc.collect()
    assert held() is None


def test_memory_that_is_read_only_is_so_for_numpy_and_a_tensor_for_torch() -> None:
    owner = Owner()
    held = weakref.ref(owner)
    view = Exported(ctypes.addressof(owner.buffer), (4,), (1,), "uint8", (CPU, 0), owner, writable=False)
    array, tensor = np.from_dlpack(view), torch.from_dlpack(view)
    assert (array.tolist(), tensor.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    capsules = [view.__dlpack__(), view.__dlpack__(max_version=(1, 0))]
    assert [repr(capsule).split('"')[1] for capsule in capsules] == ["dltensor", "dltensor_versioned"]
    del owner, view, array, tensor, capsules
    gc.collect()
    assert held() is None


def test_a_copy_or_another_device_is_refused() -> None:
    view = exported(Owner(), "uint8", (4,), (1,))
    with pytest.raises(BufferError):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        view.__dlpack__(dl_device=(CUDA, 0))


def test_gpu_memory_has_the_cuda_array_interface_in_bytes() -> None:
    view = Exported(4096, (2, 4), (32, 1), "uint16", (CUDA, 0), None)
    assert view.__cuda_array_interface__ == {
        "shape": (2, 4),
        "strides": (64, 2),
        "typestr": "<u2",
        "data": (4096, False),
        "version": 3,
    }
    read_only = Exported(4096, (2,), (1,), "uint16", (CUDA, 0), None, writable=False)
    assert read_only.__cuda_array_interface__["data"] == (4096, True)
    assert not hasattr(exported(Owner(), "uint16", (2,), (1,)), "__cuda_array_interface__")
