"""A daemon that may open no descriptor waits for better times, with all it holds."""

import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.daemon.raw_worker import ask, attach_socket
from tests.running_kvd import RunningKvd, eventually

import kvd_client
from kvd.v1 import attach_pb2 as ab

from .geometry import SPEC

TOO_FEW = 4  # descriptors; a running process has more, so it cannot open another


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """As long as this lasts, the process cannot open a file, accept a connection or start a child."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (TOO_FEW, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_daemon_that_cannot_accept_keeps_its_leases_and_accepts_later(kvd: RunningKvd) -> None:
    daemon_pid = kvd.daemon_pid()
    with kvd_client.connect(kvd.run_dir) as client, ExitStack() as stack:
        lease = client.pool("full", SPEC, 8).lease(tokens=16)
        with without_descriptors(daemon_pid):
            knocking = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            knocking.connect(str(kvd.run_dir / "host0" / "attach.sock"))
            eventually(lambda: "Too many open files" in kvd.log.read_text(), "a refused connection")
        assert lease.extend(32).size == 32
        kvd_client.connect(kvd.run_dir).close()
        assert kvd.daemon_pid() == daemon_pid


def test_a_daemon_that_cannot_start_a_kernel_worker_tries_again_and_keeps_its_leases(kvd: RunningKvd) -> None:
    daemon_pid, kernel_pid = kvd.daemon_pid(), kvd.kernel_pid()
    with kvd_client.connect(kvd.run_dir) as client:
        lease = client.pool("full", SPEC, 8).lease(tokens=16)
        with without_descriptors(daemon_pid):
            os.kill(kernel_pid, signal.SIGKILL)
            eventually(lambda: "Too many open files" in kvd.log.read_text(), "a worker that does not start")
        assert kvd.kernel_pid() != kernel_pid
        assert lease.extend(32).size == 32
        assert kvd.daemon_pid() == daemon_pid


def test_a_process_is_not_said_to_be_gone_for_want_of_a_descriptor(kvd: RunningKvd) -> None:
    request = ab.AttachRequest(ticket=ab.TicketRequest())
    with attach_socket(kvd.run_dir) as connection:
        assert ask(connection, request)[0].ticket.ticket
        with without_descriptors(kvd.daemon_pid()):
            error = ask(connection, request)[0].error
            assert (error.reason, "no descriptor left" in error.message) == ("DEVICE_UNAVAILABLE", True)
        assert ask(connection, request)[0].ticket.ticket
