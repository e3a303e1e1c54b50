"""Tickets: 256 bits, good once, good soon, and nobody can use up those of others."""

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator

import pytest
from tests.daemon.raw_worker import new_ticket
from tests.running_kvd import RunningKvd

from kvd.credentials import TICKET_METADATA
from kvd.errors import LimitExceededError, TicketInvalidError
from kvd_daemon.engine.peers import Peer
from kvd_daemon.engine.tickets import (
    MAX_TICKETS_PER_PROCESS,
    MAX_TICKETS_PER_USER,
    TICKET_BYTES,
    TICKET_TTL_NS,
    Tickets,
)

from .calls import answer_to
from .test_matrix import connect, unix_channel


class Ticketing:
    """Tickets in an event loop, which peers need; descriptors are given back at the end."""

    def __init__(self) -> None:
        self.tickets = Tickets()

    @staticmethod
    def peer(uid: int = 1000, process: int = 0) -> Peer:
        """Of this process; `process` tells several apart."""
        peer = Peer(os.pidfd_open(os.getpid()), os.getpid(), uid)
        peer.identity = (*peer.identity, process)
        return peer


@contextlib.contextmanager
def ticketing() -> Iterator[Ticketing]:
    made = Ticketing()
    gc.collect()  # what other tests left to it must not count
    before = len(os.listdir("/proc/self/fd"))
    try:
        yield made
    finally:
        made.tickets.close()
    assert len(os.listdir("/proc/self/fd")) == before


def in_a_loop(test):
    """A plain function that runs within an event loop."""

    def run() -> None:
        async def body() -> None:
            test()

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


@in_a_loop
def test_a_ticket_is_good_once() -> None:
    with ticketing() as desk:
        ticket = desk.tickets.issue(desk.peer(), 0)
        assert len(ticket) == TICKET_BYTES == 32
        desk.tickets.redeem(ticket, 1).close()
        with pytest.raises(TicketInvalidError):
            desk.tickets.redeem(ticket, 1)


@in_a_loop
def test_a_ticket_is_good_soon() -> None:
    with ticketing() as desk:
        in_time, late = desk.tickets.issue(desk.peer(), 0), desk.tickets.issue(desk.peer(), 0)
        desk.tickets.redeem(in_time, TICKET_TTL_NS - 1).close()
        with pytest.raises(TicketInvalidError):
            desk.tickets.redeem(late, TICKET_TTL_NS)


@in_a_loop
def test_another_ticket_is_no_ticket() -> None:
    with ticketing() as desk:
        ticket = desk.tickets.issue(desk.peer(), 0)
        for wrong in (b"", ticket[:-1], ticket + b"\0", bytes(TICKET_BYTES), ticket[::-1]):
            with pytest.raises(TicketInvalidError):
                desk.tickets.redeem(wrong, 1)
        desk.tickets.redeem(ticket, 1).close()


@in_a_loop
def test_the_processes_of_one_user_cannot_use_up_the_tickets_of_others() -> None:
    with ticketing() as desk:
        processes = MAX_TICKETS_PER_USER // MAX_TICKETS_PER_PROCESS
        for process in range(processes):
            for _ in range(MAX_TICKETS_PER_PROCESS + 1):
                desk.tickets.issue(desk.peer(1000, process), 0)
        one_more = desk.peer(1000, processes)
        with pytest.raises(LimitExceededError, match="512 of them for user 1000"):
            desk.tickets.issue(one_more, 0)
        one_more.close()
        desk.tickets.redeem(desk.tickets.issue(desk.peer(2000), 0), 0).close()


def test_a_ticket_that_opened_a_session_proves_nothing_more(kvd: RunningKvd) -> None:
    ticket, status = new_ticket(kvd.run_dir), "/kvd.v1.AdminService/GetStatus"
    with unix_channel(kvd.run_dir) as channel:
        metadata = ((TICKET_METADATA, ticket),)
        assert answer_to(channel, status, metadata) == "served"
        assert answer_to(channel, status, metadata) == "TICKET_INVALID"
        assert connect(channel, ticket) == "TICKET_INVALID"
