"""What a compression is asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd_cuda.dtypes import Array, DoubleArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.planes import KVPlanes

METHODS = ("snapkv", "span", "span_block", "h2o", "keydiff", "expected", "streaming")
VOTING = ("snapkv", "span", "span_block")
REDUCTIONS = ("mean", "max")
POOLINGS = ("avg", "max")
ROPE_STYLES = ("half", "interleaved")
MAX_KERNEL = 255  # tokens; wider pooling than any measured setting


@dataclass(frozen=True)
class Rope:
    """How keys were rotated, so that they can be rotated further.

    inv_freq   float64 [rotary_dim / 2], the worker's own (YaRN, llama3 scaling included), never from theta
    style      "half" pairs element i with i + rotary_dim / 2; "interleaved" pairs 2 i with 2 i + 1
    originals  per layer [slots, kv_heads, head_dim_k] in storage dtype: rotate from these, not from what
               lies in the pool, so that repeated shifts never round twice
    """

    inv_freq: DoubleArray
    style: str = "half"
    originals: Sequence[Array] | None = None

    def check(self, planes: KVPlanes, slot_count: int) -> None:
        """Raise KernelInputError unless `slot_count` keys of `planes` can be rotated by this."""
        if planes.dtype == "float8_e4m3fn":
            raise KernelInputError('fp8 keys cannot be rotated again (3 mantissa bits); use rope="original"')
        if self.style not in ROPE_STYLES:
            raise KernelInputError(f"rope style {self.style!r}; use one of {', '.join(ROPE_STYLES)}")
        if self.inv_freq.dtype != np.float64 or not 0 < 2 * self.inv_freq.size <= planes.head_dim_k:
            raise KernelInputError("inv_freq must be float64 with at most head_dim / 2 entries")
        shape = (slot_count, planes.kv_heads, planes.head_dim_k)
        if self.originals is not None and [(o.shape, o.dtype) for o in self.originals] != [
            (shape, plane.dtype) for plane in planes.k
        ]:
            raise KernelInputError(f"originals must be {shape} of {planes.k[0].dtype} for every layer")


@dataclass(frozen=True, kw_only=True)
class CompressPlan:
    """One compression of one lease.

    method             one of METHODS; "snapkv" with sinks is the two-stage pipeline ("dual")
    target_tokens      C kept per kv head, sinks and window included; the caller rounds to whole blocks
    sinks, window      first and last tokens that stay; for h2o and keydiff window is `recent`
    kernel, pooling    odd width, "avg" or "max", of voting methods
    reduce             "mean" over group heads of the summed window (SnapKV), or "max" over both (Span)
    destination_table  int32 [ceil(C / block_size)] blocks disjoint from the source, or None: in place
    rope               streaming only: move the sink keys forward, next to the window
    """

    method: str
    target_tokens: int
    sinks: int = 0
    window: int = 32
    kernel: int = 5
    pooling: str = "avg"
    reduce: str = "mean"
    destination_table: IntArray | None = None
    rope: Rope | None = None

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("reduce", self.reduce, REDUCTIONS)
        if self.target_tokens < 1 or self.sinks < 0 or self.window < 0:
            raise KernelInputError("target_tokens must be positive, sinks and window not negative")
        if self.method in VOTING:
            check_pooling(self.kernel, self.pooling)
        if self.rope is not None and self.method != "streaming":
            raise KernelInputError(f"{self.method} keeps original positions; rope is for streaming")

    def check_budget(self, window: int) -> None:
        """Raise KernelInputError unless sinks and the last `window` tokens fit into target_tokens."""
        if self.target_tokens < self.sinks + window:
            raise KernelInputError(
                f"target_tokens={self.target_tokens} is less than sinks={self.sinks} + window={window}; "
                f"keep at least {self.sinks + window} tokens or shorten the window"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise KernelInputError(f"{name}={value!r}; use one of {', '.join(allowed)}")


def check_pooling(kernel: int, kind: str) -> None:
    """Raise KernelInputError unless `kernel` is odd and in range and `kind` is known."""
    _one_of("pooling", kind, POOLINGS)
    if not 1 <= kernel <= MAX_KERNEL or kernel % 2 == 0:
        raise KernelInputError(
            f"kernel={kernel}; pooling needs an odd width from 1 to {MAX_KERNEL}, such as 5 or 7"
        )
