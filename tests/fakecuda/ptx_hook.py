"""Runs the kernels that a process launches on a fake GPU in the PTX interpreter: FAKECUDA_HOOK names it.

What a kernel may touch is what the process has mapped; the interpreter works on a copy of it, which goes back
when the kernel has ended well. A process that dies meanwhile has changed nothing.
"""

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
from tests.ptx.interpreter.errors import PtxError
from tests.ptx.interpreter.machine import Machine
from tests.ptx.interpreter.memory import Array, GlobalMemory
from tests.ptx.interpreter.operands import numpy_type
from tests.ptx.interpreter.program import Program, parse

ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS
_LIBRARY = ctypes.CDLL("libcuda.so.1")
_LIBRARY.fakecuda_region.argtypes = (c_int, POINTER(c_uint64), POINTER(c_uint64))
_PROGRAMS: list[Program] = []
_LOAD = ctypes.CFUNCTYPE(c_int, c_char_p)
_HAS = ctypes.CFUNCTYPE(c_int, c_int, c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, POINTER(c_uint), POINTER(c_void_p))


class MappedMemory(GlobalMemory):
    """What this process has mapped of fake GPUs, at its very addresses."""

    def __init__(self) -> None:
        self._regions = sorted(_regions())
        self._starts = np.array([start for start, _ in self._regions], np.int64)
        self._sizes = np.array([size for _, size in self._regions], np.int64)
        self._places = np.cumsum(self._sizes) - self._sizes
        super().__init__(int(self._sizes.sum()))
        for place, region in zip(self._places, self._regions, strict=True):
            self.store.bytes[place : place + region[1]] = _bytes_of(region)
        self.store.written[:] = True
        self._before = self.store.bytes.copy()

    def offsets(self, addresses: Array, width: int) -> Array:
        """See GlobalMemory."""
        at = addresses.astype(np.int64)
        owner = np.searchsorted(self._starts, at, side="right") - 1
        ends = self._starts + self._sizes
        outside = (owner < 0) | (at + width > ends[np.maximum(owner, 0)])
        if outside.any():
            raise PtxError(f"access of {width} bytes at {int(at[outside][0]):#x}, where nothing is mapped")
        places: Array = at - self._starts[owner] + self._places[owner]
        return places

    def give_back(self) -> None:
        """What has changed, which raises nothing where it may be written."""
        for place, region in zip(self._places, self._regions, strict=True):
            after = self.store.bytes[place : place + region[1]]
            changed = np.flatnonzero(after != self._before[place : place + region[1]])
            _bytes_of(region)[changed] = after[changed]


def _regions() -> list[tuple[int, int]]:
    found, at, size = [], c_uint64(), c_uint64()
    while _LIBRARY.fakecuda_region(len(found), at, size):
        found.append((at.value, size.value))
    return found


def _bytes_of(region: tuple[int, int]) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * region[1]).from_address(region[0]))


@_LOAD
def _load(image: bytes) -> int:
    if b".version" not in image:
        return 0
    _PROGRAMS.append(parse(image.decode()))
    return len(_PROGRAMS)


@_HAS
def _has(module: int, name: bytes) -> int:
    return name.decode() in _PROGRAMS[module - 1].kernels


@_LAUNCH
def _launch(module: int, name: bytes, shape: Any, values: Any) -> int:
    program, machine, memory = _PROGRAMS[module - 1], Machine(0), MappedMemory()
    machine.memory = memory
    declared = program.kernels[name.decode()].parameters
    arguments = tuple(_value(values[index], kind) for index, kind in declared.values())
    try:
        machine.launch(program, name.decode(), tuple(shape[0:3]), shape[3], arguments)
    except PtxError as error:
        print(f"fakecuda: {error}", file=sys.stderr)
        return ILLEGAL_ADDRESS
    memory.give_back()
    return 0


def _value(address: int | None, kind: str) -> int | float:
    dtype = numpy_type(kind)
    content = ctypes.string_at(address or 0, dtype.itemsize)
    value: int | float = np.frombuffer(content, dtype)[0].item()
    return value


class _Hook(ctypes.Structure):
    _fields_ = [("load", _LOAD), ("has", _HAS), ("launch", _LAUNCH)]


_LIBRARY.fakecuda_set_hook.argtypes = (_Hook,)
_LIBRARY.fakecuda_set_hook(_Hook(_load, _has, _launch))
