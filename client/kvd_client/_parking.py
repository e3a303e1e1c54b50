"""Leases that leave the pool for a while."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd.errors import LeaseSuspendedError
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import LeaseCall, held, taken_up
from kvd_client._checked import seconds
from kvd_client._handle import LeaseHandle
from kvd_client._session import Session, new_request_id
from kvd_client._state import SlotState
from kvd_client._waiting import wait_seconds, waiting

if TYPE_CHECKING:
    from kvd_client._pool import Pool

COPY_S = 60.0  # a kernel worker copies a gigabyte in a second or two, but others may come first


def patience_seconds(session: Session, timeout: float | None) -> float:
    """Of calls that copy. Raises InvalidArgumentError."""
    return max(COPY_S, session.timeout_s) if timeout is None else seconds("timeout", timeout)


class Parkable:
    """Base of `Lease`."""

    pool: "Pool"
    handle: LeaseHandle

    def suspend(self, timeout: float | None = None) -> None:
        """Park what it holds in the daemon's host tier and give all its blocks back, until `resume`.

        Asks the daemon. You promise to have stopped writing; kernels that read or wrote the lease have
        finished. Until it is resumed it has no slots: every call but `release`, and `block_table`, raises
        LeaseSuspendedError. Nobody else's lease is touched for it. Raises TierFullError,
        KernelWorkerUnavailableError (it is as it was).
        """
        self.pool.check_writable()
        session, handle = self.pool.session, self.handle
        deadline = session.deadline(patience_seconds(session, timeout))

        def request() -> pb.SuspendRequest:
            return pb.SuspendRequest(request_id=new_request_id(), progress=handle.progress())

        if taken_up(session, handle, request, deadline) is None:
            with held(session, [handle], deadline):
                _make(self, session.share_service.Suspend, request(), deadline, handle.leave)

    def resume(self, wait: float = 0.0, timeout: float | None = None) -> None:
        """Go on with a suspended lease: all it had, in other blocks. Take table and slots anew.

        `wait` as in `Pool.lease`. Asks the daemon. Raises PoolExhaustedError, QuotaExceededError,
        TierFullError (it lies on disk, and host memory has no room on its way back; retry after
        `retry_after_ns`), KernelWorkerUnavailableError (it is suspended still after each of these),
        LeaseLostError (what was parked is damaged).
        """
        self.pool.check_writable()
        wait_s, session = wait_seconds(wait), self.pool.session
        deadline = session.deadline(patience_seconds(session, timeout) + wait_s)
        was_suspended = self.handle.is_suspended
        with self.handle.roused(LeaseSuspendedError), held(session, [self.handle], deadline):
            if was_suspended and not self.handle.is_suspended:
                return  # an earlier resume that broke off was carried out, or another thread's
            request = pb.ResumeRequest(
                request_id=new_request_id(),
                lease_id=self.handle.lease_id,
                generation=self.handle.state.generation,
            )
            with waiting(request, wait_s):
                _make(self, session.share_service.Resume, request, deadline, self.handle.come_back)

    def restore(self, wait: float = 0.0, timeout: float | None = None) -> int:
        """Go back to what it held before its first `compress(park=True)`; by how many tokens it is back.

        Those came later and were computed against what the compression had kept: run them again. Table,
        length and position are new. `wait` as in `Pool.lease`. Asks the daemon. Raises PoolExhaustedError,
        QuotaExceededError, TierFullError (as `resume`), KernelWorkerUnavailableError and CheckpointLostError
        (it is as it was).
        """
        self.pool.check_writable()
        wait_s, session = wait_seconds(wait), self.pool.session
        deadline = session.deadline(patience_seconds(session, timeout) + wait_s)

        def request() -> pb.RestoreRequest:
            return pb.RestoreRequest(request_id=new_request_id(), progress=self.handle.progress())

        answer = taken_up(session, self.handle, request, deadline)
        if answer is None:
            with held(session, [self.handle], deadline), waiting(request(), wait_s) as asked:
                answer = _make(self, session.share_service.Restore, asked, deadline, self.handle.learn)
        return int(answer.dropped_tokens)

    def drop_checkpoint(self) -> None:
        """Give up what `restore` would go back to, and its room; the next `compress(park=True)` parks anew.

        Asks the daemon. Also of a suspended lease. Harmless without a checkpoint.
        """
        self.pool.check_writable()
        session, handle = self.pool.session, self.handle
        deadline = session.deadline()
        with handle.roused(LeaseSuspendedError), held(session, [handle], deadline):
            request = pb.DropCheckpointRequest(request_id=new_request_id(), lease_id=handle.lease_id)
            call = LeaseCall([handle], session.share_service.DropCheckpoint, request, lambda _: None)
            call.make(session, deadline)


def _make(
    lease: Parkable, method: Any, request: Any, deadline: float, learn: Callable[[SlotState], None]
) -> Any:
    handle = lease.handle

    def apply(answer: Any) -> None:
        learn(handle.state.after(answer.lease))

    return LeaseCall([handle], method, request, apply).make(lease.pool.session, deadline)
