"""Real processes and signals: what `kvd` says, what it refuses, and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.running_kvd import RunningKvd, eventually, is_alive, running_kvd, start_kvd

from .raw_worker import RawWorker


def refusal(folder: Path, *arguments: str) -> str:
    """The stderr of a kvd that must refuse with exit status 2 and print nothing on stdout."""
    kvd = start_kvd(folder, *arguments)
    stdout, _ = kvd.process.communicate(timeout=60)
    assert kvd.process.returncode == 2, kvd.log.read_text()
    assert stdout == ""
    return kvd.log.read_text()


def test_one_line_says_that_all_devices_are_ready(start_kvd: Callable[..., RunningKvd]) -> None:
    kvd = start_kvd("--host-memory", "64MiB", "--devices", "2")
    devices = "host0 64 MiB, host1 64 MiB"
    assert kvd.ready_line == f"kvd ready: {devices}; run dir {kvd.run_dir}; pid {kvd.process.pid}\n"


def test_sigint_stops_it_like_sigterm(tmp_path: Path) -> None:
    kvd = start_kvd(tmp_path, "--host-memory", "64MiB")
    kvd.wait_until_ready()
    kvd.stop(signal.SIGINT)


def test_it_stops_while_workers_hold_sessions_and_leases(tmp_path: Path) -> None:
    with running_kvd(tmp_path) as kvd:
        worker = RawWorker(kvd.run_dir)
        worker.create_pool()
        worker.lease(100)
        kvd.kernel_pid()
    worker.vanish()


def test_a_second_kvd_in_the_same_run_dir_is_refused_with_a_hint(kvd: RunningKvd, tmp_path: Path) -> None:
    said = refusal(tmp_path, "--host-memory", "64MiB")
    assert "another kvd serves" in said
    assert "--run-dir" in said
    with RawWorker(kvd.run_dir) as worker:
        assert worker.status().pid == kvd.daemon_pid()


def test_a_killed_supervisor_takes_its_children_along_and_the_next_kvd_cleans_up(tmp_path: Path) -> None:
    first = start_kvd(tmp_path, "--host-memory", "64MiB")
    first.wait_until_ready()
    first.kernel_pid()
    pids = first.pids()
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.communicate(timeout=60)
    eventually(lambda: not any(map(is_alive, pids)), "the children's end")
    assert (first.run_dir / "host0/grpc.sock").exists()
    with running_kvd(tmp_path) as second, RawWorker(second.run_dir) as worker:
        assert worker.status().device == "host0"


def test_a_dead_device_daemon_is_replaced_and_its_pools_go_on(kvd: RunningKvd) -> None:
    worker = RawWorker(kvd.run_dir)
    pool = worker.create_pool()
    old_pid, old_epoch = kvd.daemon_pid(), worker.status().epoch
    os.kill(old_pid, signal.SIGKILL)
    eventually(lambda: not is_alive(old_pid), "the daemon's end")
    worker.vanish()
    eventually(lambda: kvd.log.read_text().count(" serving ") == 2, "another daemon")
    with RawWorker(kvd.run_dir) as another:
        assert another.status().epoch != old_epoch
        assert [status.pool.pool_id for status in another.status().pools] == [pool.pool_id]


def test_more_memory_than_the_machine_has_is_refused_with_a_hint(tmp_path: Path) -> None:
    said = refusal(tmp_path, "--host-memory", "60TiB")
    assert "available here" in said
    assert "or less" in said


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "--host-memory 2GiB"),
        (("--gpus", "0-"), "'0-' is no GPU"),
        (("--gpus", "0", "--host-memory", "64MiB"), "one kvd serves GPUs or host memory"),
        (("--host-memory", "2 elephants"), 'a size such as "2GiB" is needed'),
        (("--host-memory", "64MiB", "--session-ttl", "soon"), 'a duration such as "30s" is needed'),
        (("--host-memory", "64MiB", "--devices", "1000"), "devices is 1000"),
        (("--host-memory", "64MiB", "--config", "/nonexistent/kvd.toml"), "name a readable file"),
    ],
)
def test_an_operators_mistake_is_refused_with_the_way_out(
    tmp_path: Path, arguments: tuple[str, ...], hint: str
) -> None:
    assert hint in refusal(tmp_path, *arguments)


def test_an_unknown_key_in_kvd_toml_is_an_error_that_names_the_close_one(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('host_memry = "1GiB"\n')
    assert "did you mean host_memory?" in refusal(tmp_path, "--config", str(config))


def test_the_command_line_wins_over_kvd_toml(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('host_memory = "1GiB"\ndevices = 1\n')
    with running_kvd(tmp_path, "--config", str(config), "--host-memory", "64MiB") as kvd:
        assert "host0 64 MiB" in kvd.ready_line


def test_a_run_dir_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    assert "chmod go-w" in refusal(tmp_path, "--host-memory", "64MiB")


def test_the_sockets_are_for_their_owner_only(kvd: RunningKvd) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in kvd.run_dir.rglob("*")}
    journal = {name: mode for name, mode in modes.items() if name.endswith((".segment", ".snapshot"))}
    assert set(journal.values()) == {0o600}
    sockets = {"grpc.sock": 0o600, "attach.sock": 0o600, "lock": 0o600, "host0.kvd": 0o600}
    assert modes == {"host0": 0o700, "journal": 0o700} | sockets | journal


def test_the_supervisor_and_the_daemon_import_neither_torch_nor_numba(kvd: RunningKvd) -> None:
    for pid in (kvd.process.pid, kvd.daemon_pid()):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "torch" not in maps
        assert "llvmlite" not in maps
    assert "numpy" not in Path(f"/proc/{kvd.process.pid}/maps").read_text()


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kvd_daemon.cli", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--host-memory", "--devices", "--run-dir", "--config", "--session-ttl", "--log-level"):
        assert option in shown.stdout
