"""Workers in pid namespaces that the daemon does not see: known by pidfd, whatever their pids are."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

from kvd.errors import UnauthenticatedError
from kvd_daemon.processes import identity_of

from .workers import worker

CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")  # whoever runs is process 1
BODY = """
client = kvd_client.connect(run_dir, timeout=60, name=hear())
lease = client.pool("pool", SPEC, 64).lease()
fill(lease, 16 * 8, 1.0)
say(os.getpid())
for line in sys.stdin:
    say(outcome(lease.check))
"""
THIEF = """
import kvd_client._stream as stream
client = kvd_client.connect(run_dir, timeout=60)
ticket = stream.ask_ticket(client._session.endpoint.attach_path, 60)
opening = stream.pb.OpenSession(ticket=ticket, resume_token=bytes.fromhex(hear()))
try:
    next(client._session._stream._service.Connect(iter([stream.pb.ConnectRequest(open=opening)])))
except stream.grpc.RpcError as error:
    say(type(stream.from_rpc_error(error)).__name__)
hear()
"""


def refusal() -> str:
    """Why this machine makes no pid namespace for us; empty if it does."""
    done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@contextlib.contextmanager
def kvd_in_a_container(folder: Path) -> Iterator[RunningKvd]:
    """Everybody outside has the pid 0 for it."""
    command = [*CONTAINER, sys.executable, "-m", "kvd_daemon.cli", "--run-dir", str(folder / "run")]
    with (folder / "kvd.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host-memory", "64MiB"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    kvd = RunningKvd(process, folder / "run", folder / "kvd.log")
    try:
        kvd.wait_until_ready()
        yield kvd
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def two_workers_of_one_pid(daemon: Daemon, prefix: tuple[str, ...]) -> set[str]:
    """One is killed, the other goes on; the pids they have for themselves."""
    with worker(daemon.run_dir, BODY, prefix) as first, worker(daemon.run_dir, BODY, prefix) as second:
        pids = {first.ask("first"), second.ask("second")}
        held = daemon.pool_status("pool").blocks_leased
        first.kill()
        eventually(lambda: daemon.session_names() == ["second"], "the first one's end")
        assert second.ask() == "fine"
        assert daemon.pool_status("pool").blocks_leased == held // 2
        second.kill()
        eventually(lambda: daemon.pool_status("pool").blocks_free == 64, "the second one's end")
    return pids


def test_two_containers_with_equal_pids_are_two_workers(daemon: Daemon) -> None:
    if why_not := refusal():
        assert "not permitted" in why_not
    else:
        assert two_workers_of_one_pid(daemon, CONTAINER) == {"1"}


def test_a_daemon_in_a_container_sees_the_end_of_workers_outside(tmp_path: Path) -> None:
    if why_not := refusal():
        assert "not permitted" in why_not
        return
    with kvd_in_a_container(tmp_path) as kvd:
        assert len(two_workers_of_one_pid(Daemon(kvd), ())) == 2


def test_a_token_is_of_no_use_to_another_process_of_the_same_pid(tmp_path: Path) -> None:
    if why_not := refusal():
        assert "not permitted" in why_not
        return
    owner = BODY + "say(client._session.connected().token.hex())\nhear()"
    owner = owner.replace("for line in sys.stdin:\n    say(outcome(lease.check))\n", "hear()\n")
    with (
        kvd_in_a_container(tmp_path) as kvd,
        worker(kvd.run_dir, owner) as first,
        worker(kvd.run_dir, THIEF) as thief,
    ):
        first.ask("owner")
        assert thief.ask(first.ask()) == "NotOwnerError"


def test_where_nothing_tells_a_process_from_others_of_its_pid_it_is_refused() -> None:
    """As before Linux 6.9, where all pidfds share an inode; here that of any anonymous file."""
    shared = os.eventfd(0)
    try:
        with pytest.raises(UnauthenticatedError, match="share the pid namespace"):
            identity_of(shared, 0)
        assert identity_of(shared, os.getpid()) == identity_of(shared, os.getpid())
        assert identity_of(shared, os.getpid()) != identity_of(shared, os.getppid())
    finally:
        os.close(shared)
