"""Fences: what the daemon says of a lease without being asked, in memory that it writes and workers read.

Whoever reads a lease's bytes looks before and after: a worker that was stopped, slow or cut off gets the
lease's fate, not bytes that may be another's by then.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvd.errors import LeaseBusyError, StaleGenerationError
from kvd.v1 import kvd_pb2 as pb
from kvd_client._attach import Descriptors
from kvd_client._calls import Callee, LeaseCall, held
from kvd_client._session import Session, new_request_id
from kvd_client._state import SlotState

GENERATION_BITS = 24  # of a word; the lease's id has the other 40, see attach.proto
GENERATION_MASK = (1 << GENERATION_BITS) - 1


class Fences:
    """A device's words, mapped read-only."""

    def __init__(self, descriptors: Descriptors) -> None:
        size = descriptors.fence_bytes
        self.words = memoryview(mmap.mmap(descriptors.fence_fd, size, prot=mmap.PROT_READ)).cast("Q")


def fence_word(lease_id: int, generation: int) -> int:
    """What stands in a lease's slot as long as its table may be used."""
    return lease_id << GENERATION_BITS | generation & GENERATION_MASK


class Fenced(Callee, Protocol):
    """A lease, as its readers see it."""

    state: SlotState
    fences: Fences
    fence_slot: int

    def learn(self, state: SlotState) -> None: ...
    def progress(self) -> pb.LeaseProgress: ...


@contextmanager
def looked_after(lease: Fenced, session: Session) -> Iterator[SlotState]:
    """The lease's slots, and that they were the lease's all the time. Raises what `look` does."""
    state = lease.state
    look(lease, state, session)
    yield state
    look(lease, state, session)


def look(lease: Fenced, state: SlotState, session: Session) -> None:
    """Raises what became of the lease if the table of `state` may not be used (any more).

    The daemon is asked only then: LeaseGoneError, LeaseBusyError, StaleGenerationError, or why it does not
    answer.
    """
    lease.check()
    if lease.fences.words[lease.fence_slot] == fence_word(lease.lease_id, state.generation):
        return
    if not lease.lock.acquire(blocking=False):
        raise LeaseBusyError(f"a call about lease {lease.lease_id} is under way; use its slots after it")
    try:
        _ask(lease, session)
    finally:
        lease.lock.release()
    raise StaleGenerationError(
        f"the slots of lease {lease.lease_id} moved meanwhile; take block table and slots anew"
    )


def _ask(lease: Fenced, session: Session) -> None:
    """Giving back no blocks changes nothing, and is refused with the lease's fate."""

    def apply(answer: pb.ReleaseBlocksResponse) -> None:
        lease.learn(lease.state.after(answer.lease))

    deadline = session.deadline()
    with held(session, [lease], deadline):
        request = pb.ReleaseBlocksRequest(request_id=new_request_id(), progress=lease.progress())
        LeaseCall([lease], session.lease_service.ReleaseBlocks, request, apply).make(session, deadline)
