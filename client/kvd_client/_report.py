"""What a compression did, and what it may need to know of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.arguments import one_of, refused
from kvd.policy import ROPE_STYLES
from kvd.spec import MAX_HEAD_DIM
from kvd.v1 import kvd_pb2 as pb
from kvd_client._checked import number_row

MAX_FREQUENCIES = MAX_HEAD_DIM // 2  # one for two elements of a key


@dataclass(frozen=True)
class Rope:
    """The model's rotary embedding, for Streaming(rope="cache").

    inv_freq  inverse frequencies as the model uses them (YaRN or llama3 scaling applied),
              at most head_dim_k / 2
    style     "half_split" (Llama, Qwen, Mistral) or "interleaved" (GPT-J)

    Raises InvalidArgumentError on anything else.
    """

    inv_freq: Sequence[float]
    style: str = "half_split"

    def __post_init__(self) -> None:
        one_of("style", self.style, ROPE_STYLES)
        needed = f"a row of 1 to {MAX_FREQUENCIES} finite numbers"
        row = number_row("inv_freq", self.inv_freq, "fiu", needed).astype(np.float64)
        if not 1 <= row.size <= MAX_FREQUENCIES or not np.isfinite(row).all():
            raise refused("inv_freq", self.inv_freq, needed)
        object.__setattr__(self, "inv_freq", tuple(row.tolist()))


@dataclass(frozen=True)
class CompressionReport:
    """What a compression did.

    mass_retained  float32 [layers], the share of the queries' attention that the kept tokens had; empty
                   where no queries were given
    kernel_time    seconds in the kernel worker
    """

    tokens_before: int
    tokens_kept: int
    blocks_before: int
    blocks_after: int
    unchanged: bool
    out_of_place: bool
    kernel_time: float
    mass_retained: npt.NDArray[np.float32] = field(compare=False)

    @property
    def blocks_freed(self) -> int:
        return self.blocks_before - self.blocks_after

    @classmethod
    def of_nothing(cls, tokens: int, blocks: int) -> "CompressionReport":
        """Of a lease that stayed as it was."""
        mass = np.zeros(0, np.float32)
        return cls(tokens, tokens, blocks, blocks, True, False, 0.0, mass)

    @classmethod
    def from_proto(cls, report: pb.CompressionReport) -> "CompressionReport":
        return cls(
            report.tokens_before,
            report.tokens_kept,
            report.blocks_before,
            report.blocks_after,
            report.unchanged,
            report.out_of_place,
            report.kernel_time.ToNanoseconds() / 1e9,
            np.asarray(report.mass_retained, np.float32),
        )
