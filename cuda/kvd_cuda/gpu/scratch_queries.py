"""Queries where a worker left them: in blocks of a pool on the GPU, in any order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvd_cuda.dtypes import storage_of
from kvd_cuda.gpu.device import KernelDevice, rounded
from kvd_cuda.gpu.device_lease import Columns, DeviceQueries
from kvd_cuda.gpu.elements import ITEM_BYTES
from kvd_cuda.queries import WindowQueries

LSE_BYTES = 4  # float32


@dataclass(frozen=True)
class ScratchQueries(WindowQueries):
    """`values` and `row_lse` have shapes and types, and no bytes: those lie in `stretches`.

    stretches  (address, bytes) in the GPU's memory, one after the other [layers, stored, q_heads, head_dim]
               and the log-sum-exps [layers, stored, q_heads]
    stored     queries a head that lie there
    first      of them the first that is meant
    """

    stretches: tuple[tuple[int, int], ...] = ()
    stored: int = 0
    first: int = 0

    @classmethod
    def at(
        cls, stretches: tuple[tuple[int, int], ...], shape: tuple[int, ...], dtype: str, has_lse: bool
    ) -> "ScratchQueries":
        """shape: [layers, count, q_heads, head_dim]. Raises KernelInputError for a dtype that is none."""
        values = np.broadcast_to(np.zeros((), storage_of(dtype)), shape)
        lse = np.broadcast_to(np.float32(0), shape[:3]) if has_lse else None
        return cls(values, dtype, lse, stretches, shape[1])

    def part(self, start: int, stop: int) -> "ScratchQueries":
        """See WindowQueries."""
        lse = None if self.row_lse is None else self.row_lse[:, start:stop]
        return replace(self, values=self.values[:, start:stop], row_lse=lse, first=self.first + start)

    def layer_bytes(self) -> int:
        """What `gather` takes of scratch memory for each layer, at most."""
        lse_bytes = 0 if self.row_lse is None else rounded(self._lse_row * self.count)
        return rounded(self._row * self.count) + lse_bytes

    def gather(self, device: KernelDevice, columns: Columns) -> DeviceQueries:
        """A copy of the columns' layers in one piece, in scratch memory. NaN is found by whoever uses it."""
        layers = range(columns.layer, columns.layer + columns.layers)
        values = self._gathered(device, layers, self._row, 0)
        behind = self.values.shape[0] * self.stored * self._row
        has_lse = self.row_lse is not None
        lse = self._gathered(device, layers, self._lse_row, behind) if has_lse else 0
        sizes = {"count": self.count, "query_heads": self.values.shape[2]}
        return DeviceQueries(values=values, dtype=self.dtype, row_lse=lse, **sizes)

    @property
    def _row(self) -> int:
        """Bytes of one token of one layer."""
        return int(self.values.shape[2] * self.values.shape[3]) * ITEM_BYTES[self.dtype]

    @property
    def _lse_row(self) -> int:
        return int(self.values.shape[2]) * LSE_BYTES

    def _gathered(self, device: KernelDevice, layers: range, row_bytes: int, behind: int) -> int:
        """Rows of `row_bytes` of some layers, which begin `behind` the start."""
        part_bytes = row_bytes * self.count
        goal = device.room(part_bytes * len(layers), np.uint8)
        for index, layer in enumerate(layers):
            offset = behind + (layer * self.stored + self.first) * row_bytes
            target = goal + index * part_bytes
            for address, byte_count in self._pieces(offset, part_bytes):
                device.copy(target, address, byte_count)
                target += byte_count
        return goal

    def _pieces(self, offset: int, byte_count: int) -> Iterator[tuple[int, int]]:
        """Where bytes [offset, offset + byte_count) lie."""
        begin, end, passed = offset, offset + byte_count, 0
        for address, size in self.stretches:
            low, high = max(begin, passed), min(end, passed + size)
            if low < high:
                yield address + low - passed, high - low
            passed += size
        assert end <= passed, "queries beyond their blocks"
