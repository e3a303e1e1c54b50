"""Compiled kernels: load PTX or a cubin, find a function, launch it."""

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_void_p
from dataclasses import dataclass
from typing import Any

from kvd_cuda.driver.devices import Gpu

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True)
class Grid:
    """Blocks and threads of a launch, (x, y, z) each, and dynamic shared memory per block."""

    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_bytes: int = 0


class Module:
    """Code on one GPU; it stays loaded until `unload`."""

    def __init__(self, gpu: Gpu, image: bytes) -> None:
        """`image` is PTX text or a cubin. Raises CudaError if the driver does not take it."""
        self.gpu, self._module = gpu, c_void_p()
        with gpu.context():
            gpu.driver.call("cuModuleLoadData", self._module, c_char_p(image))

    def function(self, name: str, dynamic_shared_bytes: int = 0) -> "Function":
        """Above 48 KiB of dynamic shared memory a function must be told before. Raises CudaError."""
        driver, function = self.gpu.driver, c_void_p()
        with self.gpu.context():
            driver.call("cuModuleGetFunction", function, self._module, name.encode())
            if dynamic_shared_bytes:
                driver.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, dynamic_shared_bytes)
        return Function(self, function)

    def unload(self) -> None:
        """Its kernels must have ended."""
        with self.gpu.context():
            self.gpu.driver.call("cuModuleUnload", self._module)


class Function:
    """A kernel; it is gone when its module is unloaded."""

    def __init__(self, module: Module, function: c_void_p) -> None:
        self._module = module
        self._function = function

    def launch(self, grid: Grid, arguments: Sequence[Any], stream: int = 0) -> None:
        """Start it; `arguments` are ctypes values of the parameters' sizes. Does not wait for its end."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        shape = (*grid.blocks, *grid.threads, grid.shared_bytes)
        gpu = self._module.gpu
        with gpu.context():
            gpu.driver.call("cuLaunchKernel", self._function, *shape, stream, pointers, None)
