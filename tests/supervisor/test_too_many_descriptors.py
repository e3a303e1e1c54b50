"""Descriptors that nobody could keep: the next daemon must not take their processes for gone."""

import itertools
import os
import signal
from pathlib import Path

import psutil
from tests.daemon.raw_worker import RawWorker
from tests.running_kvd import eventually, running_kvd


def lower_the_limit(pid: int) -> None:
    """The supervisor can open no descriptor any more."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in itertools.count() if number not in used)
    process = psutil.Process(pid)
    process.rlimit(psutil.RLIMIT_NOFILE, (free, process.rlimit(psutil.RLIMIT_NOFILE)[1]))


def raise_the_limit(pid: int) -> None:
    hard = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[1]
    psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE, (hard, hard))


def test_a_session_whose_pidfd_was_not_kept_lives_on_with_its_process(tmp_path: Path) -> None:
    with running_kvd(tmp_path, "--host-memory", "64MiB") as kvd:
        kvd.kernel_pid()
        lower_the_limit(kvd.process.pid)
        worker = RawWorker(kvd.run_dir)
        eventually(
            lambda: "lost its end or its descriptor" in kvd.log.read_text(), "the supervisor's complaint"
        )
        raise_the_limit(kvd.process.pid)
        os.kill(kvd.daemon_pid(), signal.SIGKILL)
        eventually(lambda: kvd.log.read_text().count("kvd.main serving") == 2, "the next daemon")
        with RawWorker(kvd.run_dir, resume_token=worker.token) as again:
            assert again.opened.session_id == worker.opened.session_id
        worker.vanish()
