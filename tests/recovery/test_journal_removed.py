"""A journal that somebody deletes under a running daemon."""

import os
import shutil
import signal

from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, eventually, is_alive

import kvd_client

from .filling import fill, values


def test_a_journal_that_was_deleted_is_back_before_the_daemon_dies(daemon: Daemon, kvd, spec) -> None:
    journal = kvd.run_dir / "host0" / "journal"
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("pool", spec, 64).lease()
        fill(lease, 16, 1.0)
        shutil.rmtree(journal)
        eventually(lambda: list(journal.glob("*.snapshot")), "the journal, whose last file that is")
        pid = kvd.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_alive(pid), "the daemon's end")
        fill(lease, 160, 1.0)
        assert values(lease) == {1.0}
        assert (daemon.status().recovery.state, daemon.status().recovery.leases) == ("recovered", 1)
        assert "files of the journal" in kvd.log.read_text()


def test_a_journal_that_cannot_be_written_again_is_told_in_health(daemon: Daemon, kvd) -> None:
    journal = kvd.run_dir / "host0" / "journal"
    pid = kvd.daemon_pid()
    os.kill(pid, signal.SIGSTOP)  # it does not come in between
    shutil.rmtree(journal)
    journal.touch()
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: "journal: File exists" in daemon.status().health_detail, "red health")
    assert daemon.status().health == "failing"
    journal.unlink()
    eventually(lambda: daemon.status().health == "serving", "health")
