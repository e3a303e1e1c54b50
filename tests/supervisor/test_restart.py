"""Daemons that make room for the next one, and new code in the supervisor's place, under live workers."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from tests.daemon.raw_worker import TIMEOUT_S, RawWorker, reason_of
from tests.running_kvd import RunningKvd, eventually, is_alive, running_kvd
from tests.supervisor.writer import Writer

import kvd_client.cli
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.settings import Settings


@pytest.fixture
def two(tmp_path: Path) -> Iterator[RunningKvd]:
    with running_kvd(tmp_path, "--host-memory", "64MiB", "--devices", "2") as kvd:
        yield kvd


def test_kvctl_restarts_daemons_one_after_another_and_leases_stay(
    two: RunningKvd, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [two.daemon_pid("host0"), two.daemon_pid("host1")]
    writer = Writer(two.run_dir, "host1")
    command = ["--run-dir", str(two.run_dir), "--timeout", "60", "daemon", "restart"]
    assert kvd_client.cli.main(command) == 0, two.log.read_text()
    said = capsys.readouterr().out
    assert "host0: kvd" in said
    assert "host1: kvd" in said
    assert "1 session and 1 lease kept" in said
    assert {two.daemon_pid("host0"), two.daemon_pid("host1")}.isdisjoint(before)
    writer.check()
    writer.close()


def test_sigterm_to_a_daemon_is_a_restart_that_loses_nothing(two: RunningKvd) -> None:
    writer = Writer(two.run_dir, "host0")
    old = two.daemon_pid()
    os.kill(old, signal.SIGTERM)
    eventually(lambda: not is_alive(old), "the old daemon's end")
    eventually(lambda: "makes room for the next one" in two.log.read_text(), "room for the next one")
    writer.check()
    writer.close()


def test_a_daemon_that_hangs_is_killed_to_make_room_and_leases_stay(two: RunningKvd) -> None:
    writer = Writer(two.run_dir, "host0")
    os.kill(two.daemon_pid("host0"), signal.SIGSTOP)
    two.process.send_signal(signal.SIGUSR2)
    eventually(lambda: two.log.read_text().count(" is replaced") == 2, "both to be replaced")
    assert "the daemon of host0 does not make room; it is killed" in two.log.read_text()
    writer.check()
    writer.close()


def test_new_code_takes_over_and_bytes_are_the_same(two: RunningKvd) -> None:
    supervisor = psutil.Process(two.process.pid)
    writers = [Writer(two.run_dir, "host0"), Writer(two.run_dir, "host1")]
    before, fds = [two.daemon_pid("host0"), two.daemon_pid("host1")], supervisor.num_fds()
    two.process.send_signal(signal.SIGUSR2)
    eventually(lambda: two.log.read_text().count(" is replaced") == 2, "both to be replaced")
    assert supervisor.is_running(), "the same process"
    eventually(lambda: supervisor.num_fds() == fds, "the descriptors of the old daemons to close")
    assert {two.daemon_pid("host0"), two.daemon_pid("host1")}.isdisjoint(before)
    for writer in writers:
        writer.check()
        writer.close()


def test_signals_that_arrive_while_code_is_replaced_are_not_lost(tmp_path: Path) -> None:
    with running_kvd(tmp_path, "--host-memory", "64MiB") as kvd:
        kvd.process.send_signal(signal.SIGUSR2)
        kvd.process.send_signal(signal.SIGHUP)
        eventually(lambda: "SIGHUP: the settings were read again" in kvd.log.read_text(), "the reload")
        eventually(lambda: " is replaced" in kvd.log.read_text(), "the replacement")


def test_code_that_cannot_start_never_takes_over(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('log_level = "info"\n')
    with running_kvd(tmp_path, "--host-memory", "64MiB", "--config", str(config)) as kvd:
        old = kvd.daemon_pid()
        config.write_text("this is no TOML")
        kvd.process.send_signal(signal.SIGUSR2)
        eventually(
            lambda: "the new code cannot take over, nothing is changed" in kvd.log.read_text(), "a refusal"
        )
        assert kvd.daemon_pid() == old
        config.write_text("")


@pytest.fixture
def lone_daemon(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A daemon of this process's own, without kvd, in tmp_path."""
    settings = Settings(host_memory_bytes=64 << 20, run_dir=str(tmp_path))
    command = [sys.executable, "-m", "kvd_daemon.main", settings.to_json(), "host0", str(os.getpid())]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    eventually((tmp_path / "host0/grpc.sock").exists, "the daemon")
    yield daemon
    daemon.kill()
    daemon.wait()


def test_a_daemon_without_a_supervisor_is_not_restarted_and_ends_by_sigterm(
    lone_daemon: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    with RawWorker(tmp_path) as worker:
        with pytest.raises(grpc.RpcError) as refused:
            worker.admin.Restart(pb.RestartRequest(), timeout=TIMEOUT_S)
        assert reason_of(refused.value) == "DEVICE_UNAVAILABLE"
    lone_daemon.terminate()
    assert lone_daemon.wait(60) == 0
    assert not (tmp_path / "host0/grpc.sock").exists()
