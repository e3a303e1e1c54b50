"""Ten thousand connections, by the Unix socket and by TCP: the daemon serves its own workers meanwhile."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.access.audit_lines import audit_lines
from tests.access.certificates import Authority
from tests.access.test_matrix import free_port
from tests.access.test_renewal import answer, write
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually, running_kvd

import kvd_client
from kvd.credentials import new_token, token_line
from kvd_daemon.engine.connections import (
    TCP_CONNECTIONS,
    Connection,
    OpenSockets,
    Shares,
    offences,
)

from .geometry import SPEC

COUNT = 10_000
PER_PROCESS = 2_500  # descriptors of one attacker; a machine may allow no more than 4,096
FEW = 512  # descriptors that a daemon may open
SHARES = Shares(per_user=6, per_process=3, per_address=2)


class Flood:
    """Processes that hold connections."""

    def __init__(self, count: int, *where: str) -> None:
        program = [sys.executable, str(Path(__file__).with_name("flood.py"))]
        self._processes = [
            subprocess.Popen(
                [*program, str(min(PER_PROCESS, count - begun)), *where],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for begun in range(0, count, PER_PROCESS)
        ]

    def began(self) -> None:
        assert [self._heard(process) for process in self._processes] == ["connected"] * len(self._processes)

    def closed(self) -> int:
        """How many connections the daemon has ended."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(int(self._heard(process)) for process in self._processes)

    def _heard(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def flood(count: int, *where: str) -> Iterator[Flood]:
    started = Flood(count, *where)
    try:
        started.began()
        yield started
    finally:
        started.end()


def fd_count(kvd: RunningKvd) -> int:
    return psutil.Process(kvd.daemon_pid()).num_fds()


def serves_workers(kvd: RunningKvd, pool: kvd_client.Pool) -> None:
    """Old ones and new ones."""
    pool.lease(tokens=16).release()
    with kvd_client.connect(kvd.run_dir, timeout=PATIENCE_S) as other:
        other.pool("flooded").lease(tokens=16).release()


def test_ten_thousand_connections_to_the_unix_socket_cost_nobody_else_anything(kvd: RunningKvd) -> None:
    pid, before = kvd.daemon_pid(), fd_count(kvd)
    with kvd_client.connect(kvd.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("flooded", SPEC, 8)
        with flood(COUNT, str(kvd.run_dir / "host0/grpc.sock")) as attack:
            serves_workers(kvd, pool)
            eventually(lambda: attack.closed() >= COUNT - 4 * 256, "the end of what is too much")
            serves_workers(kvd, pool)
            assert fd_count(kvd) < before + 1_200
            eventually(lambda: Daemon(kvd).status().health == "serving", "health")
    assert kvd.daemon_pid() == pid
    assert "connections" in {line["door"] for line in audit_lines(kvd, "refusal")}


def test_a_daemon_with_few_descriptors_does_not_run_out_of_them(tmp_path: Path) -> None:
    with running_kvd(tmp_path) as kvd:
        resource.prlimit(kvd.process.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
        pid = kvd.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: kvd.log.read_text().count("kvd.main serving") == 2, "a daemon with few descriptors"
        )
        with kvd_client.connect(kvd.run_dir, timeout=PATIENCE_S) as client:
            pool = client.pool("flooded", SPEC, 8)
            with flood(PER_PROCESS, str(kvd.run_dir / "host0/grpc.sock")):
                serves_workers(kvd, pool)
                assert fd_count(kvd) < FEW - 100
        assert "Too many open files" not in kvd.log.read_text()


def test_a_process_that_knocks_at_the_attach_socket_all_the_time_keeps_nobody_out(kvd: RunningKvd) -> None:
    before = fd_count(kvd)
    with kvd_client.connect(kvd.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("flooded", SPEC, 8)
        program = [sys.executable, str(Path(__file__).with_name("knocking.py"))]
        command = [*program, str(kvd.run_dir / "host0/attach.sock")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as knocking:
            try:
                assert knocking.stdout is not None
                assert knocking.stdout.readline() == b"knocking\n"
                for _ in range(3):
                    serves_workers(kvd, pool)
                assert fd_count(kvd) < before + 150, "a quarter of all connections, and some for workers"
            finally:
                knocking.kill()
        eventually(lambda: fd_count(kvd) < before + 20, "the end of its connections")


def test_connections_to_the_tcp_port_are_no_matter_of_workers(tmp_path: Path) -> None:
    authority, tokens, token = Authority(tmp_path, "authority"), tmp_path / "tokens", new_token()
    pair, port = authority.issue("server", "127.0.0.1"), free_port()
    write(tokens, token_line("ann", "operator", token))
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--token-file", str(tokens))
    with running_kvd(tmp_path, "--listen", f"127.0.0.1:{port}", *tls) as kvd:
        before = fd_count(kvd)
        with kvd_client.connect(kvd.run_dir, timeout=PATIENCE_S) as client:
            pool = client.pool("flooded", SPEC, 8)
            with flood(COUNT, "127.0.0.1", str(port)):
                serves_workers(kvd, pool)
                assert fd_count(kvd) < before + TCP_CONNECTIONS + 50
            eventually(
                lambda: answer(f"127.0.0.1:{port}", authority, token) == "served", "an operator's call"
            )
            eventually(lambda: Daemon(kvd).status().health == "serving", "health")


def connections(count: int, uid: int, pid: int, first: int = 0) -> list[Connection]:
    return [Connection(first + number, (uid, pid)) for number in range(count)]


def lost(found: list[Connection], *at_work: tuple[int, int]) -> dict[str, list[int]]:
    """Numbers of what each offender loses."""
    return {
        offence.who: [one.number for one in offence.excess]
        for offence in offences(found, set(at_work), SHARES)
    }


def test_a_process_loses_its_newest_connections_beyond_its_share() -> None:
    assert lost(connections(3, 1, 10)) == {}
    assert lost(connections(5, 1, 10)) == {"uid:1 pid:10": [3, 4]}


def test_a_user_loses_those_of_its_processes_that_do_no_work_here() -> None:
    found = [one for pid in range(10, 17) for one in connections(1, 1, pid, first=pid)]
    assert lost(found, (1, 12)) == {"uid:1": [10, 11, 13, 14, 15, 16]}
    assert lost(found[:6]) == {}


def test_processes_that_cannot_be_told_apart_have_their_users_share_alone() -> None:
    assert lost(connections(6, 1, 0)) == {}
    assert lost(connections(7, 1, 0)) == {"uid:1": [*range(7)]}
    assert lost(connections(7, 1, 0), (1, 0)) == {"uid:1": []}


def test_the_daemons_own_probe_and_other_users_lose_nothing() -> None:
    found = connections(9, 0, os.getpid()) + connections(3, 2, 20) + connections(9, 1, 10, first=100)
    assert lost(found) == {"uid:1 pid:10": [*range(103, 109)], "uid:1": [*range(100, 109)]}


def test_an_address_that_has_too_many_loses_them_all() -> None:
    found = [Connection(number, None, "::1") for number in range(3)] + [Connection(9, None, "::2")]
    assert lost(found) == {"address:::1": [0, 1, 2]}


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_only_accepted_sockets_of_a_door_are_found_and_cut(family: str, tmp_path: Path) -> None:
    path = str(tmp_path / "grpc.new")
    with socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET) as listener:
        listener.bind(path if family == "unix" else ("127.0.0.1", 0))
        listener.listen()
        port = 0 if family == "unix" else listener.getsockname()[1]
        with socket.socket(listener.family) as theirs:
            theirs.connect(listener.getsockname())
            ours, _ = listener.accept()
            with ours:
                sockets = OpenSockets(path, port)
                [found] = sockets
                if family == "unix":
                    assert found.owner == (os.geteuid(), os.getpid())
                else:
                    assert found.address == "127.0.0.1"
                sockets.cut([found])
                assert theirs.recv(1) == b""
            sockets.cut([found])  # it is closed: nothing else is touched
            assert list(OpenSockets(path, port)) == []
