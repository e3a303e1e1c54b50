"""kvd as a service: what systemd is told, what it keeps, and what it gives back."""

import os
import signal
from pathlib import Path

import pytest
from tests.daemon.raw_worker import RawWorker
from tests.running_kvd import RunningKvd, eventually, is_alive
from tests.supervisor.service_manager import ServiceManager

MEMORY = ("--host-memory", "256MiB")


def stop(kvd: RunningKvd) -> None:
    kvd.process.terminate()
    kvd.process.communicate(timeout=60)
    assert kvd.process.returncode == 0


def test_it_says_when_it_is_ready_reloads_and_stops(tmp_path: Path) -> None:
    with ServiceManager(tmp_path) as systemd:
        kvd = systemd.start(*MEMORY)
        try:
            systemd.until("READY=1")
            kvd.process.send_signal(signal.SIGHUP)
            systemd.until("RELOADING=1")
            systemd.until("READY=1")
            systemd.until("STATUS=host0 serving")
            stop(kvd)
            systemd.until("STOPPING=1")
        finally:
            kvd.kill()


def test_the_watchdog_hears_of_it_only_while_every_daemon_is_well(tmp_path: Path) -> None:
    with ServiceManager(tmp_path, watchdog_s=0.3) as systemd:
        kvd = systemd.start(*MEMORY, "--devices", "2")
        try:
            serving, silent = "STATUS=host0 serving, host1 serving", "STATUS=host0 serving, host1 silent"
            systemd.until(serving)
            systemd.until("WATCHDOG=1")
            stopped = kvd.daemon_pid("host1")
            os.kill(stopped, signal.SIGSTOP)
            systemd.until(silent)
            os.kill(stopped, signal.SIGCONT)
            systemd.until(serving)
            systemd.until("WATCHDOG=1")
            words = systemd.heard[systemd.heard.index(silent) :]
            recovered = next(at for at, word in enumerate(words) if word.startswith(serving))
            assert "WATCHDOG=1" not in words[:recovered]
        finally:
            kvd.kill()


def test_memory_outlives_a_killed_kvd_in_systemds_store(tmp_path: Path) -> None:
    with ServiceManager(tmp_path) as systemd:
        first = systemd.start(*MEMORY)
        try:
            first.wait_until_ready()
            worker = RawWorker(first.run_dir)
            pool_id = worker.create_pool().pool_id
            systemd.until(f"store host0.pool.{pool_id}.sidecar")
            os.pwrite(systemd.stored[f"host0.pool.{pool_id}.bytes"], b"still here", 0)
            pids = first.pids()
            first.process.kill()
            first.process.communicate(timeout=60)
            eventually(lambda: not any(map(is_alive, pids)), "the end of all")
        finally:
            first.kill()
        systemd.hear_all()
        second = systemd.start(*MEMORY)
        try:
            second.wait_until_ready()
            again = RawWorker(second.run_dir, resume_token=worker.token)
            assert again.opened.session_id == worker.opened.session_id
            _, (bytes_fd, *others) = again.map_pool()
            assert os.pread(bytes_fd, 10, 0) == b"still here"
            for fd in (bytes_fd, *others):
                os.close(fd)
            again.close()
            systemd.until(f"remove host0.session.{worker.opened.session_id}")
            again.channel.close()
            worker.channel.close()
            stop(second)
        finally:
            second.kill()


def test_a_stop_under_systemd_keeps_sessions_and_leases_for_the_next_start(tmp_path: Path) -> None:
    with ServiceManager(tmp_path) as systemd:
        first = systemd.start(*MEMORY)
        try:
            first.wait_until_ready()
            worker = RawWorker(first.run_dir)
            worker.create_pool()
            [lease] = worker.lease(40)
            stop(first)
        finally:
            first.kill()
        systemd.hear_all()
        second = systemd.start(*MEMORY)
        try:
            second.wait_until_ready()
            again = RawWorker(second.run_dir, resume_token=worker.token)
            assert again.lease_info(lease).state == "active"
            again.close()
            worker.channel.close()
            stop(second)
        finally:
            second.kill()


def test_memory_of_a_device_that_is_served_no_more_is_given_back(tmp_path: Path) -> None:
    with ServiceManager(tmp_path) as systemd:
        systemd.stored = {name: os.memfd_create(name) for name in ("host5.fence", "host0.pool.gone.bytes")}
        kvd = systemd.start(*MEMORY)
        try:
            kvd.wait_until_ready()
            eventually(
                lambda: systemd.hear_all() and not set(systemd.stored) & {"host5.fence"}, "host5's end"
            )
            eventually(lambda: systemd.hear_all() or "host0.pool.gone.bytes" not in systemd.stored, "its end")
            stop(kvd)
        finally:
            kvd.kill()


@pytest.mark.parametrize("address", ["/nonexistent/notify", "@kvd-test-nobody-listens"])
def test_a_systemd_that_does_not_listen_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    from tests.running_kvd import running_kvd

    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("FDSTORE", "100")
    with running_kvd(tmp_path) as kvd, RawWorker(kvd.run_dir) as worker:
        worker.create_pool()
