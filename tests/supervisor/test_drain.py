"""A stop that waits for leases, and one that does not."""

import signal
from pathlib import Path

import grpc
import pytest
from tests.daemon.raw_worker import RawWorker, reason_of
from tests.running_kvd import RunningKvd, running_kvd, start_kvd

import kvd_client.cli


@pytest.fixture
def patient(tmp_path: Path) -> RunningKvd:
    """A kvd that would wait for hours."""
    kvd = start_kvd(tmp_path, "--host-memory", "64MiB", "--drain-timeout", "2h")
    kvd.wait_until_ready()
    return kvd


def test_a_stop_waits_for_leases_and_grants_no_more(patient: RunningKvd) -> None:
    pids = patient.pids()
    try:
        worker = RawWorker(patient.run_dir)
        worker.create_pool()
        [lease] = worker.lease(40)
        patient.process.terminate()
        worker.stream.until("draining")
        with pytest.raises(grpc.RpcError) as refused:
            worker.lease(16)
        assert reason_of(refused.value) == "DEVICE_UNAVAILABLE"
        assert patient.process.poll() is None
        grown = worker.extend(lease, 40, 20)
        worker.release(grown)
        patient.check_end(pids)
        worker.vanish()
    finally:
        patient.kill()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_wait(patient: RunningKvd, second: signal.Signals) -> None:
    pids = patient.pids()
    try:
        worker = RawWorker(patient.run_dir)
        worker.create_pool()
        worker.lease(40)
        patient.process.terminate()
        worker.stream.until("draining")
        patient.process.send_signal(second)
        patient.check_end(pids)
        worker.vanish()
    finally:
        patient.kill()


def test_kvctl_drains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def kvctl(*arguments: str) -> str:
        assert kvd_client.cli.main(["--run-dir", str(kvd.run_dir), *arguments]) == 0
        return capsys.readouterr().out

    with running_kvd(tmp_path, "--devices", "2") as kvd, RawWorker(kvd.run_dir) as worker:
        worker.create_pool()
        worker.lease(40)
        assert kvctl("daemon", "drain", "host0").splitlines()[1].split() == ["host0", "yes", "1"]
        worker.stream.until("draining")
        assert worker.status().health == "draining"
        with pytest.raises(grpc.RpcError):
            worker.lease(16)
        assert "host1" in kvctl("daemon", "drain", "--resume")
        assert len(worker.lease(16)) == 1
