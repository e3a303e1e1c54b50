"""A run dir is one kvd's, also while it has no daemon; and what it leaves are no processes."""

import os
import signal
import time
from pathlib import Path

from tests.running_kvd import eventually, is_alive, running_kvd, start_kvd
from tests.supervisor.writer import Writer

SMALL = ("--host-memory", "64MiB")


def test_a_second_kvd_does_not_come_in_while_the_first_ones_daemon_is_replaced(tmp_path: Path) -> None:
    """It would find the journal without the memory: every lease of the first one's workers were lost."""
    with running_kvd(tmp_path, *SMALL) as first:
        writer = Writer(first.run_dir, "host0")
        old = first.daemon_pid()
        first.process.send_signal(signal.SIGSTOP)  # it is slow to start the next one
        os.kill(old, signal.SIGKILL)
        second = start_kvd(tmp_path, *SMALL)
        try:
            second.process.wait(60)
            assert second.process.returncode == 2
            assert "another kvd serves" in second.log.read_text()
        finally:
            second.kill()
            first.process.send_signal(signal.SIGCONT)
        writer.check()
        writer.close()


def test_a_kvd_that_was_killed_keeps_nobody_out(tmp_path: Path) -> None:
    first = start_kvd(tmp_path, *SMALL)
    first.wait_until_ready()
    first.kill()
    with running_kvd(tmp_path, *SMALL):
        pass


def test_new_code_in_place_of_the_old_still_holds_the_run_dir(tmp_path: Path) -> None:
    with running_kvd(tmp_path, *SMALL) as first:
        first.process.send_signal(signal.SIGUSR2)
        eventually(lambda: " is replaced" in first.log.read_text(), "the replacement")
        os.kill(first.daemon_pid(), signal.SIGSTOP)
        second = start_kvd(tmp_path, *SMALL)
        try:
            second.process.wait(60)
            assert second.process.returncode == 2
        finally:
            second.kill()
            os.kill(first.daemon_pid(), signal.SIGCONT)


def test_a_kvd_whose_daemon_had_to_be_killed_leaves_no_kernel_worker(tmp_path: Path) -> None:
    kvd = start_kvd(tmp_path, *SMALL)
    try:
        kvd.wait_until_ready()
        kernel_pid = kvd.kernel_pid()
        os.kill(kvd.daemon_pid(), signal.SIGSTOP)
        began_s = time.monotonic()
        kvd.stop()
        assert not is_alive(kernel_pid)
        assert "does not stop; it is killed" in kvd.log.read_text(), f"{time.monotonic() - began_s:.1f} s"
    finally:
        kvd.kill()
