"""Stands in for cupy, which does not run without a GPU: reads what a DLPack capsule says, as a consumer does.

The memory of a fake GPU can be read by the CPU, so the first element can be looked at.
"""

import ctypes
from typing import Any

from kvd_client._dlpack import DLManagedTensor

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
USED = b"used_dltensor"


class ndarray:  # noqa: N801 - cupy's name
    """The fields of a DLTensor; its producer hears when this is gone."""

    def __init__(self, exporter: Any) -> None:
        capsule = exporter.__dlpack__(stream=1)
        self._managed = DLManagedTensor.from_address(_pointer(capsule, b"dltensor"))
        _rename(capsule, USED)
        tensor = self._managed.dl_tensor
        self.shape = tensor.shape[: tensor.ndim]
        self.strides = tensor.strides[: tensor.ndim]
        self.dtype = [tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes]
        self.device = [tensor.device.type, tensor.device.id]
        self.address = tensor.data

    @property
    def first(self) -> float:
        """Of block 1, which a test's first lease gets."""
        return ctypes.c_float.from_address(self.address + 4 * self.strides[0]).value

    def __del__(self) -> None:
        self._managed.deleter(ctypes.byref(self._managed))


def from_dlpack(exporter: Any) -> ndarray:
    return ndarray(exporter)
