"""What daemon and kernel worker say to each other. Every request gets one Done or Failed."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Checksums = npt.NDArray[np.uint32]


def no_ids() -> IntArray:
    return np.zeros(0, np.int32)


def no_runs() -> IntArray:
    return np.zeros((0, 2), np.int32)


@dataclass(frozen=True)
class MapPool:
    """Two descriptors come with it: the pool's bytes and its sidecar. `spec` are the fields of KVSpec.

    `kind` and `uuid` are those of DeviceMemory.
    """

    pool_id: str
    spec: dict[str, Any]
    blocks_total: int
    kind: str = "host"
    uuid: str = ""


@dataclass(frozen=True)
class UnmapPool:
    pool_id: str


@dataclass(frozen=True)
class Populate:
    """Have pages for these bytes of the pool, so that no worker meets a page fault there."""

    pool_id: str
    offset: int
    byte_count: int


@dataclass(frozen=True)
class Scrub:
    """Zero blocks and their sidecar entries, then copy others, sidecar entries too.

    runs: int32 [n, 2], first block and number of blocks. copies: int32 [n, 2], from which block to which.
    """

    pool_id: str
    runs: IntArray
    copies: IntArray = field(default_factory=no_runs)


@dataclass(frozen=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, kw_only=True)
class LeaseAt:
    """Where a lease lies and stands: int32 block ids in use in table order, and the lease's numbers."""

    pool_id: str
    source: IntArray
    length: int
    position: int
    compressed_length: int
    observed_length: int


@dataclass(frozen=True, kw_only=True)
class QueriesAt:
    """Where queries lie: see kvd.v1.Queries. `scratch` int32 block ids; empty if there are no queries."""

    scratch: IntArray = field(default_factory=no_ids)
    query_count: int = 0
    query_heads: int = 0
    query_dtype: str = ""
    has_row_lse: bool = False


@dataclass(frozen=True, kw_only=True)
class Compress(LeaseAt, QueriesAt):
    """Score, select and compact. Fields named as in kvd_cuda.plan.CompressPlan mean the same.

    `destination` is empty when in place. `scrub_runs` are zeroed first. `inv_freq` is empty without rope.
    """

    method: str
    target_tokens: int
    sinks: int
    window: int
    kernel: int
    pooling: str
    reduce: str
    destination: IntArray = field(default_factory=no_ids)
    scrub_runs: IntArray = field(default_factory=no_runs)
    inv_freq: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    rope_style: str = ""


@dataclass(frozen=True, kw_only=True)
class Observe(LeaseAt, QueriesAt):
    """Add the queries' attention to the lease's running scores."""


@dataclass(frozen=True)
class Stow:
    """Copy blocks into slots of a host arena, whose descriptor comes with it. int32 [n] each."""

    pool_id: str
    source: IntArray
    slots: IntArray


@dataclass(frozen=True)
class Fetch:
    """Copy slots of a host arena into blocks; its descriptor comes with it. `checksums` uint32 [n], of Stow.

    Bytes that are damaged never get into a block: Done.damaged names their slots by index.
    """

    pool_id: str
    slots: IntArray
    destination: IntArray
    checksums: Checksums


@dataclass(frozen=True)
class CopySlots:
    """For the disk worker: copy slots from one file to another; descriptors of both come with it.

    `content_bytes` of each slot's `slot_bytes` have the checksums (uint32 [n], of Stow): Done.damaged names
    those that have others, by index, which are not written.
    """

    slot_bytes: int
    content_bytes: int
    source: IntArray
    destination: IntArray
    checksums: Checksums


@dataclass(frozen=True)
class Punch:
    """Give back the memory of slots; the descriptor of what they lie in comes with it."""

    slot_bytes: int
    slots: IntArray


@dataclass(frozen=True)
class Ready:
    """The worker's first word: everything is imported and compiled."""


@dataclass(frozen=True)
class Working:
    """Another step of the job (or of the start) is done. Said now and then, between steps."""


@dataclass(frozen=True)
class Moving:
    """From now on bytes of the lease itself change: if the worker dies, they are lost."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a job did; a job without such results leaves them at their defaults.

    kept_blocks     int32, indices into the table of the blocks kept, by-block only
    mass_retained   float32 [layers], empty without queries
    checksums       uint32 [n], CRC-32 of what went into each slot
    damaged         int32, indices of slots that do not hold what they did
    """

    kernel_ns: int = 0
    kept_tokens: int = 0
    kept_blocks: IntArray = field(default_factory=no_ids)
    mass_retained: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    checksums: Checksums = field(default_factory=lambda: np.zeros(0, np.uint32))
    damaged: IntArray = field(default_factory=no_ids)


@dataclass(frozen=True)
class Failed:
    """The job's input is refused (`caller_mistake`), or memory could not be had. Nothing was changed."""

    message: str
    caller_mistake: bool


Request = (
    MapPool | UnmapPool | Populate | Scrub | Ping | Compress | Observe | Stow | Fetch | CopySlots | Punch
)
Reply = Ready | Working | Moving | Done | Failed
Message = Request | Reply

BY_KIND: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        MapPool,
        UnmapPool,
        Populate,
        Scrub,
        Ping,
        Compress,
        Observe,
        Stow,
        Fetch,
        CopySlots,
        Punch,
        Ready,
        Working,
        Moving,
        Done,
        Failed,
    )
}
