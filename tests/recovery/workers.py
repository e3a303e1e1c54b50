"""Worker processes that do what they are told line by line, and can be stopped and killed."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

HEAD = """
import os, sys, threading
import numpy as np
import kvd_client
from kvd_client import KvdError

SPEC = kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32")

def say(*words):
    print(*words, flush=True)

def hear():
    return sys.stdin.readline().strip()

def fill(lease, tokens, value):
    rows = np.full((tokens, 1, 8), value, np.float32)
    lease.write(0, lease.extend(tokens), rows, rows)
    lease.commit(tokens)

def outcome(call):
    try:
        call()
    except KvdError as error:
        return type(error).__name__
    return "fine"

run_dir = sys.argv[1]
"""


class Worker:
    """One process. What it says is awaited: a worker that hangs is the test's timeout."""

    def __init__(self, run_dir: Path, body: str, prefix: tuple[str, ...] = ()) -> None:
        program = HEAD + textwrap.dedent(body)
        command = [*prefix, sys.executable, "-W", "error", "-c", program, str(run_dir)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str = "") -> str:
        self.tell(line)
        return self.hear()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def worker(run_dir: Path, body: str, prefix: tuple[str, ...] = ()) -> Iterator[Worker]:
    """`body` runs behind HEAD. Killed at the end, in whatever state it is."""
    started = Worker(run_dir, body, prefix)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.signal(signal.SIGCONT)
        started.kill()
