"""Runs the kernels that a process launches on a fake GPU in the PTX interpreter: FAKECUDA_HOOK names it.

What a kernel may touch is what the process has mapped; the interpreter works on copies of the pages that it
touches, which go back when the kernel has ended well; some of them, if the process is to die in its middle.
"""

import ctypes
import os
import signal
import sys
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.ptx.interpreter.errors import PtxError
from tests.ptx.interpreter.machine import Machine
from tests.ptx.interpreter.memory import Array, GlobalMemory
from tests.ptx.interpreter.operands import numpy_type
from tests.ptx.interpreter.program import Program, parse

PAGE = 4096  # bytes
ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS
_LIBRARY = ctypes.CDLL("libcuda.so.1")
_LIBRARY.fakecuda_region.argtypes = (c_int, POINTER(c_uint64), POINTER(c_uint64))
_IMAGES: list[str] = []
_WISH = f"die-{os.getpid()}"
_LOAD = ctypes.CFUNCTYPE(c_int, c_char_p)
_HAS = ctypes.CFUNCTYPE(c_int, c_int, c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, POINTER(c_uint), POINTER(c_void_p))


class MappedMemory(GlobalMemory):
    """What this process has mapped of fake GPUs, at its own addresses; copies of pages that are touched."""

    def __init__(self) -> None:
        super().__init__(0)
        regions = sorted(_regions())
        self._starts = np.array([start for start, _ in regions], np.int64)
        self._ends = np.array([start + size for start, size in regions], np.int64)
        self._before = np.zeros(0, np.uint8)  # the store as it was
        self._pages = np.zeros(0, np.int64)  # numbers of those that were touched, ascending
        self._places = np.zeros(0, np.int64)  # where each lies in the store

    def offsets(self, addresses: Array, width: int) -> Array:
        """See GlobalMemory."""
        at = addresses.astype(np.int64)
        owner = np.searchsorted(self._starts, at, side="right") - 1
        outside = (owner < 0) | (at + width > self._ends[np.maximum(owner, 0)])
        if outside.any():
            raise PtxError(f"access of {width} bytes at {int(at[outside][0]):#x}, where nothing is mapped")
        pages = at // PAGE
        new = np.setdiff1d(pages, self._pages)
        if new.size:
            self._touch(new)
        places: Array = self._places[np.searchsorted(self._pages, pages)] + at % PAGE
        return places

    def _touch(self, new: Array) -> None:
        begin = self.store.bytes.size
        content = np.concatenate([_page(int(page)) for page in new])
        self.store.extend(content)
        self._before = np.concatenate([self._before, content])
        pages = np.concatenate([self._pages, new])
        places = np.concatenate([self._places, begin + PAGE * np.arange(new.size)])
        order = np.argsort(pages)
        self._pages, self._places = pages[order], places[order]

    def give_back(self, half: bool = False) -> None:
        """What has changed, which raises nothing where it may be written; or every other page of it."""
        for page, place in list(zip(self._pages.tolist(), self._places.tolist(), strict=True))[:: 1 + half]:
            after = self.store.bytes[place : place + PAGE]
            changed = np.flatnonzero(after != self._before[place : place + PAGE])
            _page(page)[changed] = after[changed]


def _page(number: int) -> Array:
    """The memory itself. Pages are of the processor: whatever lies in them can be read."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * PAGE).from_address(number * PAGE))


def _regions() -> list[tuple[int, int]]:
    found, at, size = [], c_uint64(), c_uint64()
    while _LIBRARY.fakecuda_region(len(found), at, size):
        found.append((at.value, size.value))
    return found


@_LOAD
def _load(image: bytes) -> int:
    if b".version" not in image:
        return 0
    _IMAGES.append(image.decode())
    return len(_IMAGES)


@_HAS
def _has(module: int, name: bytes) -> int:
    return f".entry {name.decode()}(" in _IMAGES[module - 1]


@cache
def _program(module: int) -> Program:
    """Parsed when it is first launched: a worker loads many kernels and launches few."""
    return parse(_IMAGES[module - 1])


@_LAUNCH
def _launch(module: int, name: bytes, shape: Any, values: Any) -> int:
    program, machine, memory = _program(module), Machine(0), MappedMemory()
    machine.memory = memory
    declared = program.kernels[name.decode()].parameters
    arguments = tuple(_value(values[index], kind) for index, kind in declared.values())
    try:
        machine.launch(program, name.decode(), tuple(shape[0:3]), shape[3], arguments)
    except PtxError as error:
        print(f"fakecuda: {error}", file=sys.stderr)
        return ILLEGAL_ADDRESS
    if _dies_in(name.decode()):
        memory.give_back(half=True)
        os.kill(os.getpid(), signal.SIGKILL)
    memory.give_back()
    return 0


def _dies_in(name: str) -> bool:
    """Whether a test wants this process to die in the middle of that kernel."""
    return any(name.startswith(wish.read_text()) for wish in Path(os.environ["FAKECUDA_DIR"]).glob(_WISH))


def _value(address: int | None, kind: str) -> int | float:
    dtype = numpy_type(kind)
    content = ctypes.string_at(address or 0, dtype.itemsize)
    value: int | float = np.frombuffer(content, dtype)[0].item()
    return value


class _Hook(ctypes.Structure):
    _fields_ = [("load", _LOAD), ("has", _HAS), ("launch", _LAUNCH)]


_LIBRARY.fakecuda_set_hook.argtypes = (_Hook,)
_LIBRARY.fakecuda_set_hook(_Hook(_load, _has, _launch))
