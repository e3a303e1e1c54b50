"""A daemon that gets no core is slow, not broken: only one that hangs is replaced."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from tests.running_kvd import eventually

from kvd_daemon.channel import Channel, Packet
from kvd_daemon.supervisor import daemon as daemon_module
from kvd_daemon.supervisor.child import Child
from kvd_daemon.supervisor.daemon import FAILING, Daemon
from kvd_daemon.supervisor.patience import MAX_CHARGE_S, Patience

SPIN = "while True: pass"
WATCHED_S = 1.5  # seconds of ill health, three times what is allowed here


@contextlib.contextmanager
def python(code: str) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def starved() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that would run, on a core where another one always goes first."""
    core = {min(os.sched_getaffinity(0))}
    with python(SPIN) as greedy, python(SPIN) as hungry:
        for process in (greedy, hungry):
            os.sched_setaffinity(process.pid, core)
        os.sched_setscheduler(hungry.pid, os.SCHED_IDLE, os.sched_param(0))
        yield hungry


@contextlib.contextmanager
def unwell_daemon(process: "subprocess.Popen[bytes]") -> Iterator[Daemon]:
    """It serves, and says that it fails."""
    ours, theirs = Channel.pair()
    daemon = Daemon("host0", Child(process.pid, os.pidfd_open(process.pid)), ours, time.monotonic())
    theirs.send(Packet("ready"))
    theirs.send(Packet("health", {"state": FAILING, "detail": "no lease round trip for 5 s"}))
    daemon.hear(Packet.close)
    try:
        yield daemon
    finally:
        theirs.close()
        daemon.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "UNHEALTHY_S", 0.5)


def judged(daemon: Daemon) -> str:
    """What is said of it within WATCHED_S."""
    until_s = time.monotonic() + WATCHED_S
    while time.monotonic() < until_s:
        if reason := daemon.hopeless(time.monotonic()):
            return reason
        time.sleep(0.05)
    return ""


def test_a_daemon_that_waits_for_a_core_is_not_replaced() -> None:
    with starved() as process, unwell_daemon(process) as daemon:
        assert judged(daemon) == ""


def test_a_daemon_whose_kernel_worker_waits_for_a_core_is_not_replaced() -> None:
    code = (
        "import os, subprocess, sys, time; "
        f"child = subprocess.Popen([sys.executable, '-c', {SPIN!r}]); "
        "os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))}); "
        "os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0)); "
        "print('there', flush=True); sys.stdin.read(); child.kill()"
    )
    with python(SPIN) as greedy:
        os.sched_setaffinity(greedy.pid, {min(os.sched_getaffinity(0))})
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            with unwell_daemon(process) as daemon:
                assert judged(daemon) == ""
            process.communicate()


@pytest.mark.parametrize("code", [SPIN, "import time; time.sleep(60)"])
def test_a_daemon_that_spins_or_waits_for_what_never_comes_is_replaced(code: str) -> None:
    with python(code) as process, unwell_daemon(process) as daemon:
        eventually(lambda: "no lease round trip" in daemon.hopeless(time.monotonic()), "a verdict")


def test_a_daemon_that_is_stopped_is_replaced_and_one_that_got_well_begins_anew() -> None:
    with python(SPIN) as process, unwell_daemon(process) as daemon:
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "a stop")
        eventually(lambda: daemon.hopeless(time.monotonic()), "a verdict")
        daemon.state = "serving"
        assert daemon.hopeless(time.monotonic()) == ""
        daemon.state = FAILING
        assert daemon.hopeless(time.monotonic()) == ""


def test_a_supervisor_that_stood_still_holds_nothing_against_its_daemon() -> None:
    with python("import time; time.sleep(60)") as process:
        patience = Patience(process.pid, 0.0)
        assert patience.look(3600.0) == MAX_CHARGE_S
        assert patience.look(3600.5) <= MAX_CHARGE_S + 0.5
