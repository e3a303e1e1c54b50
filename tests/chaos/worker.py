"""An inference worker that does everything at random and trusts nothing.

python -m tests.chaos.worker RUN_DIR STATE_FILE NUMBER SEED

SIGUSR1: check every lease, write STATE_FILE, wait for SIGUSR2. SIGTERM: check, release, write it and end.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kvd_client
from kvd.errors import (
    ClosedError,
    CompressionRefusedError,
    DeadlineExceededError,
    ExhaustedError,
    KvdError,
    LeaseBusyError,
    LeaseExpiredError,
    LeaseGoneError,
    LeaseLostError,
    PinNotFoundError,
    PrefixNotFoundError,
    UnavailableError,
)

from .actions import Actions, Sequence
from .pattern import SPEC

POOL, BLOCKS = "chaos", 600
TIMEOUT_S = 8.0  # of one call; a daemon is back within two
HANG_S = 90.0  # a compression waits up to 60 s for kernel workers, other calls TIMEOUT_S; longer is a hang
CONNECT_S = 120.0  # until a daemon answers at all
MAX_PAUSE_S = 600.0  # waiting for SIGUSR2 while fifty daemons die, one after the other
PASSING = (
    *(ExhaustedError, UnavailableError, DeadlineExceededError, CompressionRefusedError, LeaseBusyError),
    *(PrefixNotFoundError, PinNotFoundError),
)
"""What passes, or is another one's doing: blocks are short, prefixes evicted, pins dropped."""
LOSING = ("prune", "fetch")
"""One that a kernel worker moved in place may be lost with it: the worker's own, or a resting one."""


class Worker:
    """Holds leases and uses them, and knows which losses kvd had a right to."""

    def __init__(self, run_dir: str, number: int, seed: int) -> None:
        self.client = _connected(run_dir, f"chaos {number}")
        self.actions = Actions(self._attached(), random.Random(seed), number)
        self.report = self.actions.report
        self.last_step_s = time.monotonic()
        self._longest_gap_s = 0.0

    def _attached(self) -> kvd_client.Pool:
        return self.client.pool(POOL, SPEC, BLOCKS)

    def step(self, ttl_s: float) -> None:
        """One action; an error that tells of a loss is counted, and held against kvd if it had no right."""
        self._mark()
        done = self._done(self.actions.act, ttl_s)
        self.report.actions[self.actions.doing] += done
        took_s = time.monotonic() - self.last_step_s
        if took_s > HANG_S:
            self.report.unexcused.append(f"{self.actions.doing} took {took_s:.1f} s")

    def _mark(self) -> None:
        """It is here, so much later than the last time."""
        now = time.monotonic()
        gap_s, self.last_step_s = now - self.last_step_s, now
        self._longest_gap_s = max(self._longest_gap_s * 0.99, gap_s)

    def _done(self, action: Callable[[], None], ttl_s: float) -> bool:
        try:
            action()
            return True
        except LeaseGoneError as error:
            self._lost(self.actions.current, error, ttl_s)
        except ClosedError as error:
            self.report.errors[error.reason] += 1
            self._reattach(ttl_s)
        except PASSING as error:
            self.report.errors[error.reason] += 1
        return False

    def _lost(self, sequence: Sequence | None, error: LeaseGoneError, ttl_s: float) -> None:
        """Excused: lost in the middle of a compression, or expired after a silence beyond the TTL."""
        self.report.lost[error.reason] += 1
        in_work = isinstance(error, LeaseLostError) and self.actions.doing in LOSING
        in_work = in_work and sequence is not None and sequence.where in ("", "resting")
        silent = isinstance(error, LeaseExpiredError) and self._silence_s() > ttl_s
        if not (in_work or silent):
            self.report.unexcused.append(f"{self.actions.doing}: {error}")
        if sequence is not None and sequence in self.actions.sequences:
            self.actions.sequences.remove(sequence)
            with contextlib.suppress(KvdError):
                sequence.lease.release()

    def _reattach(self, ttl_s: float) -> None:
        if self.actions.sequences and self._silence_s() <= ttl_s:
            self.report.unexcused.append("the pool was closed under a worker that was there all the time")
        self.actions.sequences.clear()
        with contextlib.suppress(KvdError):
            self.actions.pool = self._attached()

    def _silence_s(self) -> float:
        return max(self._longest_gap_s, time.monotonic() - self.last_step_s)

    # What others see of it.

    def audit(self, ttl_s: float) -> None:
        """All leases are where they are known to be; suspended ones may stay so."""
        self._mark()
        self._done(self.actions.settle, ttl_s)
        for sequence in list(self.actions.sequences):
            self._done(partial(self.actions.inspect, sequence), ttl_s)

    def state(self) -> dict[str, Any]:
        leases = {
            sequence.lease.lease_id: {
                "state": sequence.known_state,
                "table": sequence.lease.handle.state.table.tolist(),
                "sealed": sequence.lease.sealed_blocks,
            }
            for sequence in self.actions.sequences
        }
        return {"pid": os.getpid(), "leases": leases, **vars(self.report)}

    def close(self) -> None:
        for sequence in list(self.actions.sequences):
            with contextlib.suppress(KvdError):
                sequence.lease.release()
        self.client.close()


def _connected(run_dir: str, name: str) -> kvd_client.Client:
    """As soon as a daemon answers: it may be between two lives just now."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return kvd_client.connect(run_dir, name=name, timeout=TIMEOUT_S)
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    run_dir, state_file, number, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    asked: set[int] = set()
    for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(one, lambda number, _: asked.add(number))
    ttl_s = float(os.environ["KVD_CHAOS_TTL_S"])
    _publish({}, state_file)  # from now on it obeys signals
    worker = Worker(run_dir, number, seed)
    while signal.SIGTERM not in asked:
        if signal.SIGUSR1 in asked:
            asked.discard(signal.SIGUSR1)
            _pause(worker, state_file, asked, ttl_s)
        worker.step(ttl_s)
    worker.audit(ttl_s)
    worker.close()
    _publish(worker.state(), state_file)


def _pause(worker: Worker, state_file: Path, asked: set[int], ttl_s: float) -> None:
    """Until it is told to go on: a worker that did so by itself would be called a liar."""
    asked.discard(signal.SIGUSR2)  # of the pause before, had that ended by itself
    worker.audit(ttl_s)
    _publish(worker.state(), state_file)
    deadline = time.monotonic() + MAX_PAUSE_S
    while not asked & {signal.SIGUSR2, signal.SIGTERM}:
        if time.monotonic() > deadline:
            sys.exit(f"nobody told this worker to go on within {MAX_PAUSE_S:g} s")
        time.sleep(0.01)
    asked.discard(signal.SIGUSR2)
    worker.last_step_s = time.monotonic()


def _publish(state: dict[str, Any], state_file: Path) -> None:
    unfinished = state_file.with_suffix(".new")
    unfinished.write_text(json.dumps(state))
    unfinished.rename(state_file)


if __name__ == "__main__":
    main()
