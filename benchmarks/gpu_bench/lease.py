"""A lease of random tokens in GPU memory, its blocks in random order, and its window's queries."""

import ctypes
import os
from dataclasses import dataclass

import numpy as np

from kvd_cuda.driver import Mapping, OwnedMemory, RegisteredMemory, create_shareable, map_shared
from kvd_cuda.dtypes import Array, from_float32, storage_of
from kvd_cuda.gpu.backend import CudaBackend
from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.placing import DeviceSidecar
from kvd_cuda.gpu.scratch_queries import ScratchQueries
from kvd_cuda.planes import KVPlanes

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 8, 128
FINITE_FP8 = 0xBF  # of random bytes: exponents small enough that nothing is NaN


@dataclass(frozen=True)
class Case:
    """One measurement's shape."""

    tokens: int
    query_heads: int
    window: int
    dtype: str
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM

    @property
    def key_bytes(self) -> int:
        """Of all keys of one layer."""
        return self.tokens * self.kv_heads * self.head_dim * storage_of(self.dtype).itemsize

    @property
    def flop(self) -> int:
        """Of one pass of queries over keys, one layer."""
        return 2 * self.tokens * self.query_heads * self.window * self.head_dim


class BenchLease:
    """One layer, K beside V in each block. `close` gives the GPU's memory back."""

    def __init__(self, device: KernelDevice, case: Case) -> None:
        rng = np.random.default_rng(case.tokens)
        blocks = -(-case.tokens // BLOCK_SIZE) + 1
        shape = (blocks, 2, BLOCK_SIZE, case.kv_heads, case.head_dim)
        content = random_values(rng, shape, case.dtype)
        self.memory = shared(device, content)
        side = np.zeros((2, blocks, 1, case.kv_heads, BLOCK_SIZE), np.int32)
        registered = RegisteredMemory(device.gpu, side.ctypes.data, side.nbytes, side)
        at_gpu = (ctypes.c_uint8 * content.nbytes).from_address(self.memory.address)
        both: Array = np.ctypeslib.as_array(at_gpu).view(content.dtype).reshape(shape)
        self.planes = KVPlanes(
            k=[both[:, 0]],
            v=[both[:, 1]],
            dtype=case.dtype,
            block_table=(rng.permutation(blocks - 1) + 1).astype(np.int32),
            length=case.tokens,
            position=case.tokens,
            positions=side[0],
            scores=side[1].view(np.float32),
        )
        sidecar = DeviceSidecar(registered.address, registered.address + side[0].nbytes)
        self.backend, self._registered = CudaBackend(device, sidecar), registered
        self.queries, self._asked = _queries(device, case, rng)

    def close(self) -> None:
        """Nothing of it may be under way."""
        self.memory.close()
        self._asked.free()


def _queries(
    device: KernelDevice, case: Case, rng: np.random.Generator
) -> tuple[ScratchQueries, OwnedMemory]:
    shape = (1, case.window, case.query_heads, case.head_dim)
    values = random_values(rng, shape, "bfloat16")
    memory = OwnedMemory(device.gpu, values.nbytes)
    staged = device.put(values)
    device.copy(memory.address, staged, values.nbytes)
    device.finish()
    device.rewind()
    stretches = ((memory.address, values.nbytes),)
    return ScratchQueries.at(stretches, shape, "bfloat16", has_lse=False), memory


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Of ordinary size, in the storage of `dtype`."""
    if dtype == "float8_e4m3fn":
        codes = rng.integers(0, 256, shape, np.uint8)
        codes &= FINITE_FP8
        return codes
    return from_float32(rng.standard_normal(shape, dtype=np.float32), dtype)


def shared(device: KernelDevice, content: Array) -> Mapping:
    """Pool memory with that content."""
    fd = create_shareable(device.gpu, content.nbytes)
    mapping = map_shared(device.gpu, fd, content.nbytes)
    os.close(fd)
    mapping.write(0, content.ctypes.data, content.nbytes)
    return mapping
