"""A lease on a GPU, real or fake, beside its twin on the host."""

import ctypes
import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from tests.kernels.leases import Lease, Shape, make_lease

from kvd_cuda.driver import (
    Gpu,
    Mapping,
    OwnedMemory,
    RegisteredMemory,
    create_shareable,
    gpus,
    load_driver,
    map_shared,
)
from kvd_cuda.dtypes import Array
from kvd_cuda.gpu.backend import CudaBackend
from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.placing import DeviceSidecar
from kvd_cuda.gpu.scratch_queries import ScratchQueries
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries


@dataclass
class Twins:
    """The same lease twice: `host` as always, and one on the GPU, whose `planes` must not be looked at."""

    host: Lease
    planes: KVPlanes
    backend: CudaBackend
    memory: Mapping
    first_host_address: int
    registered: list[RegisteredMemory]
    owned: list[OwnedMemory] = field(default_factory=list)

    def same(self) -> bool:
        """Whether all bytes of the pool and all positions are the same."""
        size = self.memory.byte_count
        mine = np.empty(size, np.uint8)
        self.memory.read(0, mine.ctypes.data, size)
        theirs = host_bytes(self.first_host_address, size)
        positions = self.planes.positions.tobytes() == self.host.planes.positions.tobytes()
        return bool((mine == theirs).all()) and positions

    def close(self) -> None:
        """Give the GPU's memory back."""
        self.memory.close()
        for owned in self.owned:
            owned.free()

    def queries(self, asked: WindowQueries) -> ScratchQueries:
        """On the GPU, in three pieces of odd sizes."""
        lse = b"" if asked.row_lse is None else asked.row_lse.tobytes()
        content = np.frombuffer(asked.values.tobytes() + lse, np.uint8)
        cuts = [0, content.size // 3, content.size // 2 + 1, content.size]
        stretches = []
        for begin, end in pairwise(cuts):
            memory = OwnedMemory(self.memory.gpu, end - begin)
            self.owned.append(memory)
            part = content[begin:end].copy()
            with self.memory.gpu.context():
                self.memory.gpu.driver.call("cuMemcpyHtoD_v2", memory.address, part.ctypes.data, part.size)
            stretches.append((memory.address, part.size))
        return ScratchQueries.at(tuple(stretches), asked.values.shape, asked.dtype, asked.row_lse is not None)


def host_bytes(address: int, count: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def the_device(cache: Path, scratch_bytes: int = 2 << 20) -> KernelDevice:
    return KernelDevice(the_gpu(), cache, scratch_bytes=scratch_bytes)


def the_gpu() -> Gpu:
    return gpus(load_driver())[0]


def twins(device: KernelDevice, shape: Shape, seed: int, **numbers: int) -> Twins:
    """`numbers` are fields of KVPlanes such as compressed_length."""
    host = make_lease(np.random.default_rng(seed), shape)
    rng = np.random.default_rng(seed + 1)
    host.planes.positions[...] = rng.integers(0, 10**6, host.planes.positions.shape)
    host.planes.scores[...] = rng.random(host.planes.scores.shape)
    host = host.with_planes(replace(host.planes, **numbers))  # type: ignore[arg-type]
    low, high = extent(host.planes)
    fd = create_shareable(device.gpu, high - low)
    memory = map_shared(device.gpu, fd, high - low)
    os.close(fd)
    memory.write(0, low, high - low)
    positions, scores = host.planes.positions.copy(), host.planes.scores.copy()
    registered = [RegisteredMemory(device.gpu, a.ctypes.data, a.nbytes, a) for a in (positions, scores)]
    moved = memory.address - low
    planes = replace(
        host.planes,
        k=[at_address(plane, moved) for plane in host.planes.k],
        v=[at_address(plane, moved) for plane in host.planes.v],
        positions=positions,
        scores=scores,
    )
    backend = CudaBackend(device, DeviceSidecar(*(memory.address for memory in registered)))
    return Twins(host, planes, backend, memory, low, registered)


def extent(planes: KVPlanes) -> tuple[int, int]:
    every = (*planes.k, *planes.v)
    starts = [plane.__array_interface__["data"][0] for plane in every]
    spans = [(plane.shape[0] - 1) * plane.strides[0] + plane[0].nbytes for plane in every]
    return min(starts), max(start + span for start, span in zip(starts, spans, strict=True))


def at_address(plane: Array, moved: int) -> Array:
    """The same array somewhere else."""
    start = plane.__array_interface__["data"][0] + moved
    span = (plane.shape[0] - 1) * plane.strides[0] + plane[0].nbytes
    there = (ctypes.c_uint8 * span).from_address(start)
    return np.ndarray(plane.shape, plane.dtype, there, 0, plane.strides)
