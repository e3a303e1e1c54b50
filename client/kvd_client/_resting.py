"""Leases that are left alone for a while, and may be pruned meanwhile."""

from typing import TYPE_CHECKING

from kvd.arguments import whole
from kvd.errors import LeaseRestingError
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import LeaseCall, held, taken_up
from kvd_client._handle import LeaseHandle
from kvd_client._parking import patience_seconds
from kvd_client._session import new_request_id
from kvd_client._state import SlotState

if TYPE_CHECKING:
    from kvd_client._pool import Pool


class Restable:
    """Base of `Lease`."""

    pool: "Pool"
    handle: LeaseHandle

    @property
    def compress_wanted(self) -> int | None:
        """To how many tokens others would like this lease pruned, or None: look at the next step boundary.

        Only of leases with a `floor` (see `Pool.lease`), after an event `Pressure`; until it was compressed.
        Pass it on as `Keep(tokens=...)`: a bare keep=1 is a ratio, everything.
        """
        floor = self.handle.wanted_floor
        return floor if 0 < floor < self.handle.state.length else None

    def rest(self, floor: int | None = None) -> None:
        """Leave the lease alone until `wake()`: between two turns, say. Asks the daemon.

        When others wait for blocks meanwhile, the daemon prunes it with KeyDiff to `floor` tokens (0: not at
        all; None: the floor it was leased with), its policy's sinks at least. Your kernels that read or write
        it have finished; every other call about it raises LeaseRestingError. With sealed blocks, what stays
        needs other blocks: it gives nothing as long as the pool has not so many free, its reserve included.
        """
        self.pool.check_writable()
        tokens = None if floor is None else whole("floor", floor, 0, MAX_TOKENS_PER_LEASE)
        session, handle = self.pool.session, self.handle
        deadline = session.deadline()

        def request() -> pb.RestRequest:
            return pb.RestRequest(
                request_id=new_request_id(), progress=handle.progress(), floor_tokens=tokens
            )

        if taken_up(session, handle, request, deadline) is None:
            with held(session, [handle], deadline):
                method = session.share_service.Rest
                LeaseCall([handle], method, request(), lambda _: handle.lie_down()).make(session, deadline)

    def wake(self, timeout: float | None = None) -> int:
        """Go on with it; how many tokens it has given meanwhile. Harmless if it does not rest.

        Asks the daemon, and waits for a pruning that is under way: `timeout` as of `compress`. Table, length
        and generation may be new; `position` is as before. After a DeadlineExceededError or an
        UnavailableError it counts as resting still: wake() it again. Raises LeaseSuspendedError.
        """
        self.pool.check_writable()
        session, handle = self.pool.session, self.handle
        deadline = session.deadline(patience_seconds(session, timeout))
        rested, had = handle.is_resting, handle.state.length
        with handle.roused(LeaseRestingError), held(session, [handle], deadline):
            if handle.is_resting:  # neither awake all the time, nor since a wake() that broke off
                rested = True
                request = pb.WakeRequest(request_id=new_request_id(), lease_id=handle.lease_id)
                method, come_back = session.share_service.Wake, handle.come_back
                call = LeaseCall(
                    [handle], method, request, lambda answer: come_back(SlotState.granted(answer.lease))
                )
                call.make(session, deadline)
            return had - handle.state.length if rested else 0
