"""Signals that arrive while kvd starts or ends, and settings that a later daemon could not start with."""

import os
import signal
from pathlib import Path

import pytest
from tests.running_kvd import RunningKvd, eventually, running_kvd, start_kvd

SMALL = ("--host-memory", "64MiB")


def test_an_upgrade_that_arrives_with_a_stop_does_not_undo_it(tmp_path: Path) -> None:
    kvd = start_kvd(tmp_path, *SMALL)
    try:
        kvd.wait_until_ready()
        pids = kvd.pids()
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT):
            kvd.process.send_signal(number)
        kvd.check_end(pids)
    finally:
        kvd.kill()


def test_an_upgrade_before_everything_serves_takes_no_ready_line_away(tmp_path: Path) -> None:
    kvd = start_kvd(tmp_path, *SMALL)
    try:
        os.kill(kvd.daemon_pid(), signal.SIGSTOP)
        kvd.process.send_signal(signal.SIGUSR2)
        eventually(lambda: "SIGUSR2 is passed over" in kvd.log.read_text(), "the upgrade's refusal")
        os.kill(kvd.daemon_pid(), signal.SIGCONT)
        kvd.wait_until_ready()
        kvd.stop()
    finally:
        kvd.kill()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_a_port_whose_files_cannot_be_read_is_not_taken_over(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text("")
    with running_kvd(tmp_path, *SMALL, "--config", str(config)) as kvd:
        config.write_text(
            'listen = "127.0.0.1:1"\ntls_cert = "none"\ntls_key = "none"\ntoken_file = "none"\n'
        )
        kvd.process.send_signal(number)
        eventually(lambda: "TLS key none" in kvd.log.read_text(), "the complaint")
        survives_a_killed_daemon(kvd)


def survives_a_killed_daemon(kvd: RunningKvd) -> None:
    served = kvd.log.read_text().count(" serving ")
    os.kill(kvd.daemon_pid(), signal.SIGKILL)
    eventually(lambda: kvd.log.read_text().count(" serving ") > served, "the next daemon")
