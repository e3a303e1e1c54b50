"""Views of raw memory for any framework that takes DLPack or the CUDA array interface.

An own export, since numpy has no bfloat16, and whoever maps the memory shall need no framework for it. The
consumer's tensor keeps `owner` alive; nothing is copied. Source: dlpack.h, version 1.0; numba's CUDA Array
Interface, version 3.
"""

import ctypes
from ctypes import (
    POINTER,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from dataclasses import dataclass
from typing import Any

CPU, CUDA = 1, 2  # DLDeviceType
UNUSED, UNUSED_VERSIONED = b"dltensor", b"dltensor_versioned"  # capsules' names until somebody takes them
VERSIONED = (1, 0)  # from then on a capsule says whether its memory may be written
READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
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


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class DLManagedTensor(ctypes.Structure):
    """What a capsule points to: one that cannot say that it is read-only."""

    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", _Deleter)]


class DLManagedTensorVersioned(ctypes.Structure):
    """What a capsule points to if the consumer knows version 1.0."""

    _fields_ = [
        ("version", c_uint32 * 2),
        ("manager_ctx", c_void_p),
        ("deleter", _Deleter),
        ("flags", c_uint64),
        ("dl_tensor", DLTensor),
    ]


_Destructor = ctypes.PYFUNCTYPE(None, c_void_p)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = py_object, [c_void_p, c_char_p, _Destructor]
_is_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

_living: dict[int, tuple[object, ...]] = {}
"""What consumers use, by the address of its managed tensor."""


def _let_go(address: int, living: dict[int, tuple[object, ...]] = _living) -> None:
    living.pop(address, None)


def _destroyed(capsule: int) -> None:
    """A capsule that nobody consumed: else it has another name by now."""
    for unused in (UNUSED, UNUSED_VERSIONED):
        if _is_valid(capsule, unused):
            _let_go(_pointer(capsule, unused))


_delete, _destroy = _Deleter(_let_go), _Destructor(_destroyed)


@dataclass(frozen=True)
class Exported:
    """Memory at `address`; `strides` in elements. `device` is (CPU or CUDA, index in this process).

    That it is not `writable` is told to consumers that can be told. numpy heeds it, torch does not.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[int, int]
    owner: object
    writable: bool = True

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
        told = not self.writable and max_version is not None and tuple(max_version) >= VERSIONED
        managed: DLManagedTensor | DLManagedTensorVersioned
        if told:
            managed = DLManagedTensorVersioned((c_uint32 * 2)(*VERSIONED), None, _delete, READ_ONLY, tensor)
        else:
            managed = DLManagedTensor(tensor, None, _delete)
        _living[ctypes.addressof(managed)] = (managed, shape, strides, self.owner)
        return _new(ctypes.addressof(managed), UNUSED_VERSIONED if told else UNUSED, _destroy)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        _, bits, typestr = CODES[self.dtype]
        if self.device[0] != CUDA or typestr is None:
            raise AttributeError("only GPU memory of a type that numpy knows has __cuda_array_interface__")
        return {
            "shape": self.shape,
            "strides": tuple(stride * bits // 8 for stride in self.strides),
            "typestr": typestr,
            "data": (self.address, not self.writable),
            "version": 3,
        }
