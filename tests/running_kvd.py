"""A real `kvd` for tests: started, awaited, stopped, and nothing may be left of it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE_S = 60.0  # before a test gives up; nothing takes that long unless it hangs
AUDIT_LOG = "audit.jsonl"
POLL_S = 0.01  # between two looks at something no descriptor tells


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until it holds; a test that waits in vain says for what."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain: {what}"
        time.sleep(POLL_S)


def is_alive(pid: int) -> bool:
    """Zombies are dead: their sockets and memory are gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """Of a dead one nothing."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@dataclass
class RunningKvd:
    """The supervisor's process, where it serves, and what it said."""

    process: "subprocess.Popen[str]"
    run_dir: Path
    log: Path
    ready_line: str = ""

    def daemon_pid(self, device: str = "host0") -> int:
        """The device daemon's process, as soon as there is one."""
        found: list[int] = []

        def look() -> bool:
            children = psutil.Process(self.process.pid).children()
            found[:] = [child.pid for child in children if device in command_of(child)]
            return bool(found)

        eventually(look, f"a daemon of {device}")
        return found[0]

    def kernel_pid(self, device: str = "host0") -> int:
        """The kernel worker's process, as soon as there is one."""
        daemon = psutil.Process(self.daemon_pid(device))
        eventually(daemon.children, "a kernel worker")
        return daemon.children()[0].pid

    def pids(self) -> list[int]:
        """The supervisor and all below it."""
        return [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]

    def wait_until_ready(self) -> None:
        """Raises AssertionError with the log if it ends or hangs before it serves."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        self.ready_line = self.process.stdout.readline() if readable else ""
        assert self.ready_line.startswith("kvd ready: "), f"no ready line\n{self.log.read_text()}"

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Exit status 0, and no process, socket or further line on stdout stays behind."""
        pids = self.pids()
        self.process.send_signal(signal_number)
        self.check_end(pids)

    def check_end(self, pids: list[int]) -> None:
        """As of `stop`, where a signal was sent already. `pids` ran before that."""
        further_lines, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, self.log.read_text()
        assert further_lines == ""
        assert [pid for pid in pids if is_alive(pid)] == []
        left = {path.name for path in self.run_dir.rglob("*") if not path.is_dir()}
        assert left <= {AUDIT_LOG}, "nothing but the audit log outlives kvd"

    def kill(self) -> None:
        """Whatever state it is in."""
        for pid in self.pids() if is_alive(self.process.pid) else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE_S)


def start_kvd(folder: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> RunningKvd:
    """Start `kvd ARGUMENTS` with its run dir and its log in `folder`; do not wait."""
    run_dir, log = folder / "run", folder / "kvd.log"
    command = [sys.executable, "-m", "kvd_daemon.cli", "--run-dir", str(run_dir), *arguments]
    with log.open("a") as log_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=environment,
        )
    return RunningKvd(process, run_dir, log)


@contextlib.contextmanager
def running_kvd(
    folder: Path, *arguments: str, environment: Mapping[str, str] = os.environ
) -> Iterator[RunningKvd]:
    """A kvd that serves (256 MiB of host memory unless told otherwise) and leaves nothing behind."""
    memory = () if {"--host-memory", "--gpus"} & set(arguments) else ("--host-memory", "256MiB")
    kvd = start_kvd(folder, *memory, *arguments, environment=environment)
    try:
        kvd.wait_until_ready()
        yield kvd
        kvd.stop()
    finally:
        kvd.kill()
