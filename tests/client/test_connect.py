"""Finding the daemon, opening and ending a session."""

import gc
import os
import subprocess
import sys
import threading

import pytest
from tests.running_kvd import eventually

import kvd_client

from .daemon import Daemon


def test_a_run_directory_leads_to_its_device(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.run_dir, name="one") as client:
        assert client.device == "host0"
        assert client.epoch == daemon.status().epoch


def test_a_device_directory_is_an_endpoint_too(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.run_dir / "host0", device="host0") as client:
        assert client.device == "host0"


@pytest.mark.parametrize("variable", ["KVD_ENDPOINT", "KVD_RUN_DIR"])
def test_the_environment_says_where(daemon: Daemon, monkeypatch, variable) -> None:
    monkeypatch.delenv("KVD_ENDPOINT", raising=False)
    monkeypatch.setenv(variable, str(daemon.run_dir))
    with kvd_client.connect() as client:
        assert client.tenant


def test_the_session_is_seen_and_goes_with_close(daemon: Daemon) -> None:
    client = kvd_client.connect(daemon.run_dir, name="seen")
    assert "seen" in daemon.session_names()
    client.close()
    eventually(lambda: "seen" not in daemon.session_names(), "the session to end")
    client.close()


def test_an_empty_directory_says_how_to_start_a_daemon(tmp_path) -> None:
    with pytest.raises(kvd_client.DeviceUnavailableError, match=f"kvd --run-dir {tmp_path}"):
        kvd_client.connect(tmp_path)


def test_another_device_than_the_directory_is_refused(daemon: Daemon) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="host0"):
        kvd_client.connect(daemon.run_dir / "host0", device="host1")


def test_a_device_that_is_not_there_is_unavailable_within_the_deadline(daemon: Daemon) -> None:
    with pytest.raises(kvd_client.DeviceUnavailableError, match="host7"):
        kvd_client.connect(daemon.run_dir, device="host7", timeout=0.2)


def test_a_path_too_long_for_a_socket_is_said_before_it_is_tried(tmp_path) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="fits a socket"):
        kvd_client.connect(tmp_path / ("x" * 200), device="host0")


def test_a_socket_nobody_listens_on_is_unavailable(tmp_path) -> None:
    folder = tmp_path / "host0"
    folder.mkdir()
    (folder / "attach.sock").touch()
    with pytest.raises(kvd_client.DeviceUnavailableError, match="is kvd running"):
        kvd_client.connect(tmp_path, timeout=0.2)


def test_a_closed_client_says_so(daemon: Daemon, spec) -> None:
    client = kvd_client.connect(daemon.run_dir)
    client.close()
    with pytest.raises(kvd_client.ClosedError, match="connect"):
        client.pool("any", spec, 8)


def test_a_client_that_is_garbage_collected_leaves_no_thread(daemon: Daemon) -> None:
    before = set(threading.enumerate())
    client = kvd_client.connect(daemon.run_dir)
    assert set(threading.enumerate()) - before
    del client
    gc.collect()
    eventually(lambda: not {t for t in threading.enumerate() if t.is_alive()} - before, "the thread to end")


def test_two_clients_of_one_process_are_two_sessions(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.run_dir) as one, kvd_client.connect(daemon.run_dir) as other:
        assert one.session_id != other.session_id
        assert one.epoch == other.epoch


def test_importing_the_client_loads_neither_torch_nor_the_daemon() -> None:
    code = "import kvd_client, sys; print(sorted({'torch', 'numba', 'kvd_daemon'} & set(sys.modules)))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert said.stdout.strip() == "[]"
