"""Making room for more tokens, in one call for many leases."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvd.errors import ConflictError, PoolExhaustedError, QuotaExceededError
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.policy import Streaming
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import LeaseCall
from kvd_client._handle import LeaseHandle
from kvd_client._session import Session, new_request_id
from kvd_client._state import Skip, SlotState
from kvd_client._waiting import waiting


@dataclass(frozen=True)
class Growth:
    """`tokens` more for a lease, and `ahead_blocks` more than that if there are so many."""

    handle: LeaseHandle
    tokens: int
    ahead_blocks: int

    def lacks_blocks(self, block_size: int) -> bool:
        """Whether the daemon has to be asked. Raises ConflictError."""
        state = self.handle.state
        if state.skip is None:
            if self.tokens and state.shares_tail(block_size):
                return True
            return state.length + self.tokens > state.table.size * block_size
        if self.tokens != state.skip.tokens:
            raise ConflictError(
                f"extend({self.tokens}) before the {state.skip.tokens} tokens of the last extend() are in, "
                f"{state.skip.skipped} of which are passed over; commit({state.skip.tokens}) first"
            )
        return False

    def item(self, block_size: int, ahead: bool) -> pb.ExtendItem:
        tokens = self.tokens + (self.ahead_tokens(block_size) if ahead else 0)
        return pb.ExtendItem(progress=self.handle.progress(), tokens=min(tokens, MAX_TOKENS_PER_LEASE))

    def ahead_tokens(self, block_size: int) -> int:
        """None for a streaming lease: its blocks are recycled, and none earlier than need be."""
        return 0 if isinstance(self.handle.policy, Streaming) else self.ahead_blocks * block_size

    def skip(self, before: SlotState, answer: pb.LeaseState) -> Skip | None:
        """The daemon counted the tokens that it passes over into the position."""
        skipped = answer.position - before.position
        if skipped == 0:
            return None
        return Skip(self.tokens, answer.skip_after, skipped)


def grow(
    session: Session, growths: Sequence[Growth], block_size: int, deadline: float, wait_s: float
) -> None:
    """All or none. The caller holds the leases. Only for what is needed it waits, not for blocks ahead.

    Raises PoolExhaustedError, QuotaExceededError, LimitExceededError.
    """
    lacking = [growth for growth in growths if growth.lacks_blocks(block_size)]
    if not lacking:
        return
    if any(growth.ahead_tokens(block_size) for growth in lacking):
        with suppress(PoolExhaustedError, QuotaExceededError):
            ahead = [growth.item(block_size, ahead=True) for growth in lacking]
            return _ask(session, lacking, ahead, deadline)
    _ask(session, lacking, [growth.item(block_size, ahead=False) for growth in lacking], deadline, wait_s)


def _ask(
    session: Session,
    growths: Sequence[Growth],
    items: Sequence[pb.ExtendItem],
    deadline: float,
    wait_s: float = 0.0,
) -> None:
    before = [growth.handle.state for growth in growths]
    request = pb.ExtendRequest(request_id=new_request_id(), items=items)

    def apply(answer: pb.ExtendResponse) -> None:
        for growth, state, told in zip(growths, before, answer.leases, strict=True):
            growth.handle.learn(state.after(told, growth.skip(state, told)))

    handles = [growth.handle for growth in growths]
    with waiting(request, wait_s):
        LeaseCall(handles, session.lease_service.Extend, request, apply).make(session, deadline)
