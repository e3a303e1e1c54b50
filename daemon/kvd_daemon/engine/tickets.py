"""Tickets tie a gRPC session to the process that the attach socket saw."""

import secrets
from collections import OrderedDict

from kvd.errors import LimitExceededError, TicketInvalidError

from .peers import Peer

TICKET_BYTES = 32  # 256 bits; nobody guesses one
TICKET_TTL_NS = 10_000_000_000  # ns; a worker redeems it in its next call
MAX_TICKETS = 1024  # open at a time; each holds a pidfd
MAX_TICKETS_PER_PROCESS = 16  # beyond, a process's oldest one goes: nobody can use up the tickets of all
MAX_TICKETS_PER_USER = 512  # open at a time; processes of one user cannot use them up either


class Tickets:
    """Each may be redeemed once, soon."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, tuple[Peer, int]] = OrderedDict()

    def issue(self, peer: Peer, now_ns: int) -> bytes:
        """A new ticket, which owns `peer` from now on. Raises LimitExceededError."""
        self.expire(now_ns)
        own = [ticket for ticket, (holder, _) in self._open.items() if holder.identity == peer.identity]
        if len(own) >= MAX_TICKETS_PER_PROCESS:
            self._drop(own[0])
        own_users = sum(holder.uid == peer.uid for holder, _ in self._open.values())
        if len(self._open) >= MAX_TICKETS or own_users >= MAX_TICKETS_PER_USER:
            raise LimitExceededError(
                f"{len(self._open)} tickets are open, {own_users} of them for user {peer.uid}; redeem some, "
                "or wait 10 s"
            )
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._open[ticket] = peer, now_ns + TICKET_TTL_NS
        return ticket

    def redeem(self, ticket: bytes, now_ns: int) -> Peer:
        """The peer it was issued to; the caller owns it now. Raises TicketInvalidError."""
        self.expire(now_ns)
        if ticket not in self._open:
            raise TicketInvalidError(
                "the ticket is unknown, used or older than 10 s; ask the attach socket for a new one"
            )
        peer, _ = self._open.pop(ticket)
        return peer

    def expire(self, now_ns: int) -> None:
        while self._open:
            ticket, (_, until_ns) = next(iter(self._open.items()))
            if until_ns > now_ns:
                return
            self._drop(ticket)

    def close(self) -> None:
        for ticket in list(self._open):
            self._drop(ticket)

    def _drop(self, ticket: bytes) -> None:
        peer, _ = self._open.pop(ticket)
        peer.close()
