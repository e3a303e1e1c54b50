"""One GPU at work: a stream, compiled kernels, and scratch memory that is allocated once."""

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numba.cuda import types

from kvd_cuda.driver import Function, Gpu, Grid, Module, OwnedMemory, Stream
from kvd_cuda.dtypes import Array
from kvd_cuda.gpu.compile import compiled
from kvd_cuda.gpu.device_lease import Launch
from kvd_cuda.gpu.kernel import Kernel

SCRATCH_BYTES = 40 << 20  # bytes; all a compression needs beside the lease, whatever its length
ALIGNMENT = 256  # bytes; of every allocation in it, as the driver's own
_C_TYPES: dict[Any, Any] = {
    types.int32: ctypes.c_int32,
    types.uint32: ctypes.c_uint32,
    types.uint64: ctypes.c_uint64,
    types.float32: ctypes.c_float,
}


class KernelDevice:
    """Not shared between threads. What is launched or copied is done in order, all in one stream.

    `on_step` is called whenever the GPU has caught up, and after every kernel that was made ready.
    """

    def __init__(
        self,
        gpu: Gpu,
        cache: Path,
        on_step: Callable[[], None] = lambda: None,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """Makes a context. Compiled kernels are kept in the folder `cache`. Raises CudaError."""
        self.gpu = gpu
        self._scratch_bytes = scratch_bytes
        self._cache = cache
        self._on_step = on_step
        self.stream = Stream(gpu)
        self._scratch = OwnedMemory(gpu, scratch_bytes)
        self._top = 0
        self._functions: dict[str, Function] = {}
        self._held: list[Array] = []

    def ready(self, kernel: Kernel) -> Function:
        """The kernel, loaded; compiled first if it never was on this machine. Raises CudaError."""
        if kernel.name not in self._functions:
            image = compiled(kernel, self._cache).text.encode()
            self._functions[kernel.name] = Module(self.gpu, image).function(kernel.name)
            self._on_step()
        return self._functions[kernel.name]

    def run(self, launches: Launch | Iterable[Launch]) -> None:
        """Start one after the other; `finish` tells of whatever goes wrong in them."""
        for launch in [launches] if isinstance(launches, Launch) else launches:
            function, threads = self.ready(launch.kernel), (launch.kernel.threads, 1, 1)
            arguments = _c_arguments(launch)
            function.launch(Grid(launch.grid, threads), arguments, self.stream.handle)

    def mark(self) -> int:
        """How much of the scratch memory is taken, for `rewind`."""
        return self._top

    def rewind(self, mark: int = 0) -> None:
        """Give back what was taken since; later work is in order behind what uses it now."""
        self._top = mark

    @property
    def room_bytes(self) -> int:
        """Scratch memory that is left."""
        return self._scratch_bytes - self._top

    def room(self, count: int, dtype: Any = np.float32) -> int:
        """Address of room for `count` elements. Whoever asks has seen to it that there is some."""
        start = self._top
        self._top += rounded(max(count, 1) * np.dtype(dtype).itemsize)
        assert self._top <= self._scratch_bytes, "scratch memory that was not asked for"
        return self._scratch.address + start

    def put(self, array: Array) -> int:
        """Address of a copy in scratch memory."""
        contiguous = np.ascontiguousarray(array)
        address = self.room(contiguous.size, contiguous.dtype)
        if contiguous.size:
            self._held.append(contiguous)
            self.stream.copy_in(address, contiguous.ctypes.data, contiguous.nbytes)
        return address

    def copy(self, target: int, source: int, byte_count: int) -> None:
        """Within the GPU."""
        self.stream.copy(target, source, byte_count)

    def get(self, address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """What lies there after all that was started. Raises CudaError of whatever went wrong in it."""
        found = np.empty(shape, dtype)
        self.stream.copy_out(found.ctypes.data, address, found.nbytes)
        self.finish()
        return found

    def finish(self) -> None:
        """Wait until everything is done. Raises CudaError of whatever went wrong in it."""
        self.stream.synchronize()
        self._held.clear()
        self._on_step()


def rounded(byte_count: int) -> int:
    """What an allocation of scratch memory takes."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT


def _c_arguments(launch: Launch) -> list[Any]:
    kinds = launch.kernel.flat_parameters
    assert len(kinds) == len(launch.arguments), launch.kernel.name
    pairs = zip(kinds, launch.arguments, strict=True)
    return [_C_TYPES.get(kind, ctypes.c_uint64)(value) for kind, value in pairs]
