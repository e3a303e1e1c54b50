"""Attention of a lease's queries and their votes, some columns after the other, as scratch memory allows."""

from dataclasses import dataclass

import numpy as np

from kvd_cuda.backend import LSE_TOLERANCE, NAN_SCORES, WRONG_LSE
from kvd_cuda.errors import KernelInputError
from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.device_lease import Columns, DeviceLease
from kvd_cuda.gpu.launch_choice import Pooling, pool
from kvd_cuda.gpu.launch_scores import Scoring, Scratch, score
from kvd_cuda.gpu.placing import Needs
from kvd_cuda.gpu.scores import SEGMENT
from kvd_cuda.gpu.scores_scalar import MAX_HEAD_DIM
from kvd_cuda.gpu.scratch_queries import ScratchQueries
from kvd_cuda.plan import CompressPlan

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Attention:
    """Of queries to some columns, in scratch memory: sums and peaks float32 [columns, end], errors [columns].

    by_lse  whether the rows' log-sum-exp was given, so that it may be what is wrong
    """

    columns: Columns
    end: int
    sums: int
    peaks: int
    errors: int
    by_lse: bool

    def check(self, device: KernelDevice) -> None:
        """Wait for it; KernelInputError if the attention of any row does not add up to 1."""
        worst = float(device.get(self.errors, (self.columns.count,)).max())
        if worst > LSE_TOLERANCE:
            raise KernelInputError(WRONG_LSE if self.by_lse and np.isfinite(worst) else NAN_SCORES)


@dataclass(frozen=True)
class Electorate:
    """A lease and the queries that look at it; those of the slots before `end`."""

    device: KernelDevice
    lease: DeviceLease
    queries: ScratchQueries
    end: int

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return int(self.queries.values.shape[2]) // self.lease.kv_heads

    def needs(self, slot_floats: int = 0) -> Needs:
        """Of scratch memory for `attention`, and for `slot_floats` more numbers a slot and column.

        Raises KernelInputError for keys that are too long.
        """
        refuse_long_keys(self.lease)
        rows, segments = self.queries.count * self.group, -(-self.end // SEGMENT)
        floats = 3 * rows * segments + 2 * rows + (2 + slot_floats) * self.end + 1
        return Needs(floats * FLOAT_BYTES, self.queries.layer_bytes())

    def attention(self, columns: Columns) -> Attention:
        """Start it."""
        given = self.queries.gather(self.device, columns)
        scoring = Scoring(
            lease=self.lease, columns=columns, queries=given, start=0, stop=given.count, end=self.end
        )
        sizes = scoring.scratch_floats().items()
        scratch = Scratch(**{name: self.device.room(count) for name, count in sizes})
        self.device.run(score(scoring, scratch))
        has_lse = given.row_lse != 0
        return Attention(columns, self.end, scratch.sums, scratch.peaks, scratch.errors, has_lse)

    @property
    def candidates(self) -> int:
        """Slots before those of the queries."""
        return self.end - self.queries.count

    def votes(self, seen: Attention, plan: CompressPlan) -> tuple[Pooling, int]:
        """Folded and pooled: how, and where they are: float32 [columns, candidates]. There is a candidate."""
        by_sum = plan.reduce == "mean"
        pooling = Pooling(
            rows=seen.columns.count,
            length=self.end,
            scored=self.candidates,
            kernel=plan.kernel,
            kind=plan.pooling,
            scale=1 / self.group if by_sum else 1.0,
        )
        pooled = self.device.room(pooling.rows * pooling.scored)
        self.device.run(pool(pooling, seen.sums if by_sum else seen.peaks, pooled))
        return pooling, pooled


def refuse_long_keys(lease: DeviceLease) -> None:
    """Raise KernelInputError for keys that kernels do not score."""
    if lease.k.head_dim > MAX_HEAD_DIM:
        raise KernelInputError(
            f"keys of {lease.k.head_dim} elements; kernels score up to {MAX_HEAD_DIM}: use streaming"
        )
