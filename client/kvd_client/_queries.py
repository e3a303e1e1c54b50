"""Query tensors on their way to the kernel worker."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgumentError
from kvd.spec import QUERY_DTYPES, KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd_client._spec import dtype_name
from kvd_client._tensors import tensor_of


@dataclass(frozen=True)
class QueryTensor:
    """The bytes of [layers, tokens, query_heads, head_dim_k], then those of the row log-sum-exps if any."""

    tokens: int
    query_heads: int
    dtype: str
    has_row_lse: bool
    payload: npt.NDArray[np.uint8]

    def to_proto(self, scratch_lease_id: int) -> pb.Queries:
        return pb.Queries(
            scratch_lease_id=scratch_lease_id,
            tokens=self.tokens,
            query_heads=self.query_heads,
            dtype=self.dtype,
            has_row_lse=self.has_row_lse,
        )


def pack_queries(queries: Any, row_lse: Any, spec: KVSpec, length: int) -> QueryTensor:
    """Check and flatten a torch or numpy tensor. Raises InvalidArgumentError that names the shape needed."""
    needed = f"[{spec.layers} layers, 1 to {length} tokens, query heads, {spec.head_dim_k}]"
    queries = tensor_of("queries", queries, needed)
    shape, dtype = tuple(queries.shape), dtype_name(queries.dtype)
    if len(shape) != 4 or (shape[0], shape[3]) != (spec.layers, spec.head_dim_k):
        raise InvalidArgumentError(f"queries of shape {list(shape)}; {needed} is needed")
    tokens, query_heads = shape[1], shape[2]
    if length == 0:
        raise InvalidArgumentError("queries of a lease that holds no tokens; commit() what was written first")
    if not 1 <= tokens <= length:
        raise InvalidArgumentError(f"queries of {tokens} tokens for a lease of {length}; {needed} is needed")
    if query_heads == 0 or query_heads % spec.kv_heads:
        raise InvalidArgumentError(
            f"{query_heads} query heads; a multiple of {spec.kv_heads} kv heads is needed"
        )
    if dtype not in QUERY_DTYPES:
        raise InvalidArgumentError(f"queries of {dtype}; one of {', '.join(QUERY_DTYPES)} is needed")
    parts = [_finite_bytes("queries", queries)]
    if row_lse is not None:
        given = (tuple(tensor_of("row_lse", row_lse, list(shape[:3])).shape), dtype_name(row_lse.dtype))
        if given != (shape[:3], "float32"):
            raise InvalidArgumentError(
                f"row_lse {given[1]} {list(given[0])}; float32 {list(shape[:3])} is needed"
            )
        parts.append(_finite_bytes("row_lse", row_lse))
    return QueryTensor(tokens, query_heads, dtype, row_lse is not None, np.concatenate(parts))


def _finite_bytes(name: str, tensor: Any) -> npt.NDArray[np.uint8]:
    if isinstance(tensor, np.ndarray):
        finite = bool(np.isfinite(tensor).all())
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    else:
        import torch

        tensor = tensor.detach()
        finite = bool(torch.isfinite(tensor).all())
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if not finite:
        raise InvalidArgumentError(f"{name} hold NaN or infinity; nothing can be ranked by those")
    return flat
