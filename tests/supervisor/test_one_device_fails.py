"""A device whose daemons do not come up: the others serve, operators see why, and it comes back by itself."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.running_kvd import eventually, running_kvd
from tests.supervisor.writer import Writer

import kvd_client.cli


def test_an_upgrade_stops_at_a_daemon_that_does_not_serve_and_goes_on_when_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_kvd(tmp_path, "--host-memory", "64MiB", "--devices", "2") as kvd:
        writers, folder = [Writer(kvd.run_dir, "host0"), Writer(kvd.run_dir, "host1")], kvd.run_dir / "host0"
        other = kvd.daemon_pid("host1")
        folder.chmod(0o777)  # the next daemon refuses it
        kvd.process.send_signal(signal.SIGUSR2)
        stays = "the new daemon of host0 does not serve; the others stay as they are"
        eventually(lambda: stays in kvd.log.read_text(), "the end of the upgrade")
        status = ["--run-dir", str(kvd.run_dir), "status"]
        assert kvd_client.cli.main(status) == 1
        shown = capsys.readouterr().out
        assert "host0  unreachable" in shown
        assert "its daemon ended with status 2; kvd starts another one" in shown
        assert kvd.daemon_pid("host1") == other
        writers[1].check()
        folder.chmod(0o700)
        eventually(lambda: not (folder / "down").exists(), "host0 to come back")
        for writer in writers:
            writer.check()
            writer.close()


def test_kernel_workers_of_dead_daemons_are_collected(tmp_path: Path) -> None:
    with running_kvd(tmp_path, "--host-memory", "64MiB") as kvd:
        kernel, supervisor = kvd.kernel_pid(), psutil.Process(kvd.process.pid)
        os.kill(kvd.daemon_pid(), signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(kernel), "the kernel worker to be collected")
        eventually(lambda: len(supervisor.children()) == 1, "one daemon and no zombie")


def test_one_that_serves_and_dies_again_and_again_is_started_within_half_a_second(tmp_path: Path) -> None:
    with running_kvd(tmp_path, "--host-memory", "64MiB") as kvd:
        supervisor = psutil.Process(kvd.process.pid)
        descriptors = supervisor.num_fds()
        for count, pause in enumerate(("0.1", "0.2", "0.4", "0.5"), 1):
            os.kill(kvd.daemon_pid(), signal.SIGKILL)
            said = f"ended with status -9; kvd starts another one every {pause} s"
            eventually(lambda said=said: said in kvd.log.read_text(), f"pause {count}")
            eventually(
                lambda n=count: kvd.log.read_text().count("kvd.main serving") == n + 1, "the next daemon"
            )
        assert supervisor.num_fds() == descriptors
