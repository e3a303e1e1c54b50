"""A lease in the memory of the PTX interpreter, and launches on it."""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from tests.gpu_kernels.assembler import ptx_of
from tests.ptx.interpreter.machine import Machine
from tests.ptx.interpreter.program import Program, parse

from kvd_cuda.dtypes import Array, FloatArray, IntArray
from kvd_cuda.gpu.device_lease import DeviceLease, DeviceQueries, Launch, Plane
from kvd_cuda.gpu.kernel import Kernel
from kvd_cuda.gpu.launch_scores import Scoring, Scratch, score
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries


@cache
def program_of(kernel: Kernel) -> Program:
    """The kernel's PTX, parsed."""
    return parse(ptx_of(kernel).text)


class SimulatedDevice:
    """Interpreter memory, by which host arrays and leases are mirrored.

    changed  kernel name -> PTX to run in its place: mutants
    """

    def __init__(self, memory_bytes: int = 1 << 20) -> None:
        self._machine = Machine(memory_bytes)
        self._mirrored: list[tuple[int, Array]] = []
        self.changed: dict[str, str] = {}

    def put(self, array: Array) -> int:
        """Address of a copy."""
        return self._machine.memory.put(array)

    def room(self, count: int, dtype: Any = np.float32) -> int:
        """Address of `count` elements that nobody has written."""
        return self._machine.memory.allocate(max(count, 1) * np.dtype(dtype).itemsize)

    def get(self, address: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A copy of what lies there."""
        return self._machine.memory.get(address, np.empty(shape, dtype))

    def run(self, launches: Launch | Iterable[Launch]) -> None:
        """One after the other; PtxError for whatever is wrong with one."""
        for launch in [launches] if isinstance(launches, Launch) else launches:
            name = launch.kernel.name
            program = parse(self.changed[name]) if name in self.changed else program_of(launch.kernel)
            self._machine.launch(program, name, launch.grid, launch.kernel.threads, launch.arguments)

    def put_lease(self, planes: KVPlanes) -> DeviceLease:
        """`planes` and all around them; `fetch` brings changes back into the same host memory."""
        low = min(_start(plane) for plane in (*planes.k, *planes.v))
        high = max(_end(plane) for plane in (*planes.k, *planes.v))
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
        pool = self._mirror(memory)
        return DeviceLease(
            k=self._plane(planes.k, pool - low),
            v=self._plane(planes.v, pool - low),
            dtype=planes.dtype,
            layers=planes.layers,
            kv_heads=planes.kv_heads,
            block_size=planes.block_size,
            table=self.put(planes.block_table),
            length=planes.length,
            position=planes.position,
            positions=self._mirror(planes.positions),
            scores=self._mirror(planes.scores),
            compressed_length=planes.compressed_length,
            observed_length=planes.observed_length,
        )

    def put_queries(self, queries: WindowQueries) -> DeviceQueries:
        """`queries`, with their log-sum-exp if they have one."""
        return DeviceQueries(
            values=self.put(queries.values),
            dtype=queries.dtype,
            count=queries.count,
            query_heads=queries.values.shape[2],
            row_lse=0 if queries.row_lse is None else self.put(queries.row_lse),
        )

    def fetch(self) -> None:
        """Bring mirrored arrays up to date."""
        for address, array in self._mirrored:
            array[...] = self._machine.memory.get(address, array)

    def score(self, scoring: Scoring) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(sums, peaks [layers, kv_heads, end], errors [layers, kv_heads])."""
        room = {name: self.room(count) for name, count in scoring.scratch_floats().items()}
        self.run(score(scoring, Scratch(**room)))
        columns = (scoring.columns.layers, scoring.columns.heads)
        by_slot = (*columns, scoring.end)
        return (
            self.get(room["sums"], by_slot),
            self.get(room["peaks"], by_slot),
            self.get(room["errors"], columns),
        )

    def _mirror(self, array: Array) -> int:
        address = self.put(array)
        self._mirrored.append((address, array))
        return address

    def _plane(self, layers: Any, moved: int) -> Plane:
        bases = [_start(plane) + moved for plane in layers]
        stride = layers[0].strides[0]
        alignment = next(n for n in (16, 8, 4, 2, 1) if all(value % n == 0 for value in (*bases, stride)))
        return Plane(
            bases=self.put(np.array(bases, np.uint64)),
            head_dim=layers[0].shape[3],
            block_bytes=stride,
            alignment=alignment,
        )


def _start(plane: Array) -> int:
    return int(plane.__array_interface__["data"][0])


def _end(plane: Array) -> int:
    return _start(plane) + (plane.shape[0] - 1) * plane.strides[0] + plane[0].nbytes


def whole_window(lease: DeviceLease, queries: DeviceQueries) -> Scoring:
    """All queries sent, to all slots."""
    sizes = {"start": 0, "stop": queries.count, "end": lease.length}
    return Scoring(lease=lease, columns=lease.columns, queries=queries, **sizes)


def ids(values: Any) -> IntArray:
    """int32 array."""
    return np.asarray(values, np.int32)
