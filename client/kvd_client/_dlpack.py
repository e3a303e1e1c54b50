"""Views of raw memory for any framework that takes DLPack or the CUDA array interface.

An own export, since numpy has no bfloat16, and whoever maps the memory shall need no framework for it. The
consumer's tensor keeps `owner` alive; nothing is copied. Source: dlpack.h, version 1.0; numba's CUDA Array
Interface, version 3.
"""

import ctypes
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
    py_object,
)
from dataclasses import dataclass
from typing import Any

CPU, CUDA = 1, 2  # DLDeviceType
UNUSED = b"dltensor"  # a capsule's name until somebody takes what it points to
CODES = {
    "float32": (2, 32, "<f4"),
    "float16": (2, 16, "<f2"),
    "bfloat16": (4, 16, None),
    "uint16": (1, 16, "<u2"),
    "uint8": (1, 8, "|u1"),
}
"""DLDataTypeCode, bits, and numpy's name for it, if it has one."""


class _Device(ctypes.Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(ctypes.Structure):
    """Strides are in elements."""

    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    """What a capsule points to."""


_Deleter = ctypes.CFUNCTYPE(None, POINTER(DLManagedTensor))
DLManagedTensor._fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", _Deleter)]
_Destructor = ctypes.PYFUNCTYPE(None, c_void_p)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = py_object, [c_void_p, c_char_p, _Destructor]
_is_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

_living: dict[int, tuple[object, ...]] = {}
"""What consumers use, by the address of its DLManagedTensor."""


def _let_go(address: int, living: dict[int, tuple[object, ...]] = _living) -> None:
    living.pop(address, None)


def _deleted(managed: Any, let_go: Callable[[int], None] = _let_go) -> None:
    """The consumer's last view is gone."""
    let_go(ctypes.addressof(managed.contents))


def _destroyed(capsule: int) -> None:
    """A capsule that nobody consumed: else it has another name by now."""
    if _is_valid(capsule, UNUSED):
        _let_go(_pointer(capsule, UNUSED))


_delete, _destroy = _Deleter(_deleted), _Destructor(_destroyed)


@dataclass(frozen=True)
class Exported:
    """Memory at `address`; `strides` in elements. `device` is (CPU or CUDA, index in this process)."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[int, int]
    owner: object

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule. Nothing is pending in any stream: whoever writes to a pool says when it is done."""
        if copy or (dl_device is not None and tuple(dl_device) != self.device):
            raise BufferError("a pool's memory is shared as it is, not copied")
        code, bits, _ = CODES[self.dtype]
        shape, strides = (c_int64 * len(self.shape))(*self.shape), (c_int64 * len(self.shape))(*self.strides)
        tensor = DLTensor(
            self.address, _Device(*self.device), len(self.shape), _DataType(code, bits, 1), shape, strides, 0
        )
        managed = DLManagedTensor(tensor, None, _delete)
        _living[ctypes.addressof(managed)] = (managed, shape, strides, self.owner)
        return _new(ctypes.addressof(managed), UNUSED, _destroy)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        _, bits, typestr = CODES[self.dtype]
        if self.device[0] != CUDA or typestr is None:
            raise AttributeError("only GPU memory of a type that numpy knows has __cuda_array_interface__")
        return {
            "shape": self.shape,
            "strides": tuple(stride * bits // 8 for stride in self.strides),
            "typestr": typestr,
            "data": (self.address, False),
            "version": 3,
        }
