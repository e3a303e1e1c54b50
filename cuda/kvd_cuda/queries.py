"""The queries that vote: a lease's last tokens, post-RoPE."""

from dataclasses import dataclass

import numpy as np

from kvd_cuda.dtypes import Array, DoubleArray, FloatArray, storage_of, to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.planes import KVPlanes

QUERY_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class WindowQueries:
    """Queries of the lease's last `count` slots, oldest first.

    values   [layers, count, q_heads, head_dim_k] in the storage of `dtype` (no fp8)
    row_lse  float32 [layers, count, q_heads] or None: natural log-sum-exp of each row's scaled causal scores,
             as flash attention returns it; saves the pass that finds it
    """

    values: Array
    dtype: str
    row_lse: FloatArray | None = None

    def __post_init__(self) -> None:
        if self.dtype not in QUERY_DTYPES:
            raise KernelInputError(f"queries in {self.dtype!r}; send one of {', '.join(QUERY_DTYPES)}")
        if self.values.ndim != 4 or self.values.dtype != storage_of(self.dtype):
            raise KernelInputError(
                f"queries must be [layers, count, q_heads, head_dim] of {storage_of(self.dtype)}"
            )
        if self.row_lse is not None and self.row_lse.shape != self.values.shape[:3]:
            raise KernelInputError(f"row_lse must have the shape {self.values.shape[:3]}")

    @property
    def count(self) -> int:
        """Queries a head: W_eff."""
        return int(self.values.shape[1])

    def check(self, planes: KVPlanes) -> None:
        """Raise KernelInputError unless these queries belong to `planes`."""
        layers, count, q_heads, head_dim = self.values.shape
        if layers != planes.layers or head_dim != planes.head_dim_k:
            raise KernelInputError(
                f"queries have {layers} layers of head_dim {head_dim}, "
                f"the pool {planes.layers} of {planes.head_dim_k}"
            )
        if q_heads % planes.kv_heads:
            raise KernelInputError(f"{q_heads} query heads are no multiple of {planes.kv_heads} kv heads")
        if not 1 <= count <= planes.length:
            raise KernelInputError(
                f"{count} queries for {planes.length} tokens; send those of the last tokens"
            )

    def check_finite(self) -> None:
        """Raise KernelInputError for NaN and infinity."""
        if not all(np.isfinite(to_float32(layer, self.dtype)).all() for layer in self.values):
            raise KernelInputError("queries hold NaN or infinity; send finite ones")

    def part(self, start: int, stop: int) -> "WindowQueries":
        """Queries [start, stop) of every layer."""
        lse = None if self.row_lse is None else self.row_lse[:, start:stop]
        return WindowQueries(self.values[:, start:stop], self.dtype, lse)

    def folded(self, layer: int, kv_head: int, kv_heads: int) -> FloatArray:
        """Rows of one kv head's group, head-major: float32 [group * count, head_dim]."""
        group = self.values.shape[2] // kv_heads
        rows = self.values[layer, :, kv_head * group : (kv_head + 1) * group]
        stored = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(-1, rows.shape[2])
        return to_float32(stored, self.dtype)

    def folded_lse(self, layer: int, kv_head: int, kv_heads: int) -> DoubleArray | None:
        """The log-sum-exp of the rows of `folded`, float64 [group * count], or None."""
        if self.row_lse is None:
            return None
        group = self.values.shape[2] // kv_heads
        rows = self.row_lse[layer, :, kv_head * group : (kv_head + 1) * group]
        return rows.T.reshape(-1).astype(np.float64)
