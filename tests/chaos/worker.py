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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

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
    PrefixNotFoundError,
    StaleGenerationError,
    UnavailableError,
)

from .pattern import SPEC, Text, hashes, write, wrong_bytes

POOL, BLOCKS = "chaos", 600
TIMEOUT_S = 8.0  # of one call; a daemon is back within two
HANG_S = 90.0  # a compression waits up to 60 s for kernel workers, other calls TIMEOUT_S; longer is a hang
SHARED_TEXTS = 6  # texts that several workers begin with
MAX_LEASES = 12
SHELF_S = 600.0  # longer than all faults together
MIN_PRUNED = 100  # tokens; 30 % of fewer do not hold sinks and window
MAX_PAUSE_S = 120.0  # waiting for SIGUSR2; the run was given up then
POLICIES = (
    kvd_client.Dense(),
    kvd_client.SnapKV(window=8, kernel=5, keep=0.3),
    kvd_client.Dual(sinks=4, window=8, keep=0.3),
    kvd_client.Span(window=8, kernel=5, keep=0.3, granularity="block"),
    kvd_client.Streaming(sinks=4, window=40),
)
PASSING = (ExhaustedError, UnavailableError, DeadlineExceededError, CompressionRefusedError, LeaseBusyError)


@dataclass
class Sequence:
    """A lease and the text in it; and the key it was published under, until it is adopted again."""

    lease: kvd_client.Lease
    text: Text
    key: str = ""


@dataclass
class Report:
    """What happened to this worker; all of `unexcused` must stay empty."""

    actions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    unexcused: list[str] = field(default_factory=list)
    wrong_bytes: int = 0
    checked_bytes: int = 0


class Worker:
    """Holds leases and uses them."""

    def __init__(self, run_dir: str, number: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_text = 1000 * (number + 1)
        self.client = _connected(run_dir, f"chaos {number}")
        self.pool = self._attached()
        self.sequences: list[Sequence] = []
        self._current: Sequence | None = None
        self.report = Report()
        self._last_step_s = time.monotonic()
        self._longest_gap_s = 0.0

    def _attached(self) -> kvd_client.Pool:
        return self.client.pool(POOL, SPEC, BLOCKS)

    def step(self, ttl_s: float) -> None:
        """One action; an error that tells of a loss is counted, and held against kvd if it had no right."""
        now = time.monotonic()
        gap_s, self._last_step_s = now - self._last_step_s, now
        self._longest_gap_s = max(self._longest_gap_s * 0.99, gap_s)
        action = self._random.choices(
            (
                *(self.begin, self.grow, self.prune, self.share, self.trim, self.look, self.end),
                *(self.fork, self.hand_over),
            ),
            (6, 8, 4, 2, 1, 2, 3, 3, 2),
        )[0]
        self._current = self._random.choice(self.sequences) if self.sequences else None
        if self._current is not None and self._current.key:
            action = self.hand_over
        try:
            if action == self.begin or self._current is None:
                self.begin()
            else:
                action(self._current)
            self.report.actions[action.__name__] += 1
        except LeaseGoneError as error:
            self._lost(self._current, action.__name__, error, ttl_s)
        except ClosedError as error:
            self.report.errors[error.reason] += 1
            self._reattach(ttl_s)
        except (*PASSING, PrefixNotFoundError) as error:
            self.report.errors[error.reason] += 1
        took_s = time.monotonic() - now
        if took_s > HANG_S:
            self.report.unexcused.append(f"{action.__name__} took {took_s:.1f} s")

    # Actions.

    def begin(self) -> None:
        if len(self.sequences) >= MAX_LEASES:
            return self.end(self.sequences[0])
        policy = self._random.choice(POLICIES)
        shares = self._random.random() < 0.4 and not isinstance(policy, kvd_client.Streaming)
        text = self._random.randrange(SHARED_TEXTS) if shares else self._next_text
        prefix = hashes(text, self._random.randrange(1, 4)) if shares else []
        try:
            lease = self.pool.lease(tokens=self._random.randrange(200), policy=policy, prefix=prefix)
        except PrefixNotFoundError:
            lease = self.pool.lease(tokens=self._random.randrange(200), policy=policy)
        self._next_text += not shares
        self._current = Sequence(lease, Text(text))
        self.sequences.append(self._current)
        self.grow(self._current)

    def grow(self, sequence: Sequence) -> None:
        lease, tokens = sequence.lease, self._random.randrange(1, 60)
        first_position = lease.position
        write(lease, lease.extend(tokens), sequence.text, first_position)
        lease.commit(tokens)

    def prune(self, sequence: Sequence) -> None:
        lease = sequence.lease
        if lease.length < MIN_PRUNED or isinstance(lease.policy, kvd_client.Dense):
            return
        count = 0 if isinstance(lease.policy, kvd_client.Streaming) else 8
        shape = (SPEC.layers, count, 4, SPEC.head_dim_k)
        queries = np.random.default_rng(self._random.randrange(1 << 30)).normal(size=shape) if count else None
        lease.compress(queries=None if queries is None else queries.astype(np.float32))

    def share(self, sequence: Sequence) -> None:
        lease = sequence.lease
        blocks = lease.length // SPEC.block_size
        fresh = lease.compressed_length == 0 and not isinstance(lease.policy, kvd_client.Streaming)
        fresh = fresh and not sequence.text.branches
        if fresh and lease.position == lease.length and blocks > lease.sealed_blocks:
            lease.seal(hashes(sequence.text.number, blocks))

    def fork(self, sequence: Sequence) -> None:
        """The child goes on with a text of its own: both are looked at from now on."""
        if len(self.sequences) >= MAX_LEASES or isinstance(sequence.lease.policy, kvd_client.Streaming):
            return
        for child in sequence.lease.fork(self._random.randrange(1, 3)):
            text = sequence.text.forked(child.position, self._next_text)
            self._next_text += 1
            self.sequences.append(Sequence(child, text))

    def hand_over(self, sequence: Sequence) -> None:
        """To whoever has the key, which is this worker again. A call that broke off is taken up here."""
        sequence.key = sequence.key or f"{os.getpid()} {sequence.lease.lease_id}"
        with contextlib.suppress(ClosedError):  # it is published by now
            sequence.lease.publish(sequence.key, ttl=SHELF_S)
        sequence.lease, sequence.key = self.pool.adopt(sequence.key), ""

    def trim(self, sequence: Sequence) -> None:
        if not isinstance(sequence.lease.policy, kvd_client.Streaming):
            sequence.lease.trim()

    def look(self, sequence: Sequence) -> None:
        try:
            wrong, seen = wrong_bytes(sequence.lease, sequence.text)
        except StaleGenerationError:  # a call that broke off had moved them: now they are known
            wrong, seen = wrong_bytes(sequence.lease, sequence.text)
        self.report.checked_bytes += seen
        if wrong:
            self.report.wrong_bytes += wrong
            self.report.unexcused.append(f"{wrong} wrong bytes in {sequence.lease} (text {sequence.text})")

    def end(self, sequence: Sequence) -> None:
        sequence.lease.release()
        self.sequences.remove(sequence)

    # What goes wrong.

    def _lost(self, sequence: Sequence | None, action: str, error: LeaseGoneError, ttl_s: float) -> None:
        """Excused: lost in the middle of a compression, or expired after a silence beyond the TTL."""
        self.report.lost[error.reason] += 1
        silence_s = max(self._longest_gap_s, time.monotonic() - self._last_step_s)
        in_work = isinstance(error, LeaseLostError) and action == "prune"
        silent = isinstance(error, LeaseExpiredError) and silence_s > ttl_s
        if not (in_work or silent):
            self.report.unexcused.append(f"{action}: {error}")
        if sequence in self.sequences:
            self.sequences.remove(sequence)
            with contextlib.suppress(KvdError):
                sequence.lease.release()

    def _reattach(self, ttl_s: float) -> None:
        silence_s = max(self._longest_gap_s, time.monotonic() - self._last_step_s)
        if self.sequences and silence_s <= ttl_s:
            self.report.unexcused.append("the pool was closed under a worker that was there all the time")
        self.sequences.clear()
        with contextlib.suppress(KvdError):
            self.pool = self._attached()

    # What others see of it.

    def audit(self, ttl_s: float) -> None:
        for sequence in list(self.sequences):
            try:
                if sequence.key:
                    self.hand_over(sequence)
                self.look(sequence)
            except LeaseGoneError as error:
                self._lost(sequence, "audit", error, ttl_s)
            except (ClosedError, *PASSING) as error:
                self.report.errors[error.reason] += 1

    def state(self) -> dict[str, Any]:
        leases = {
            sequence.lease.lease_id: {
                "table": sequence.lease.handle.state.table.tolist(),
                "sealed": sequence.lease.sealed_blocks,
            }
            for sequence in self.sequences
        }
        return {"pid": os.getpid(), "leases": leases, **vars(self.report)}

    def close(self) -> None:
        for sequence in list(self.sequences):
            with contextlib.suppress(KvdError):
                sequence.lease.release()
        self.client.close()


def _connected(run_dir: str, name: str) -> kvd_client.Client:
    """As soon as a daemon answers: it may be between two lives just now."""
    deadline = time.monotonic() + MAX_PAUSE_S
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
    worker.audit(ttl_s)
    _publish(worker.state(), state_file)
    deadline = time.monotonic() + MAX_PAUSE_S
    while not asked & {signal.SIGUSR2, signal.SIGTERM} and time.monotonic() < deadline:
        time.sleep(0.01)
    asked.discard(signal.SIGUSR2)
    worker._last_step_s = time.monotonic()


def _publish(state: dict[str, Any], state_file: Path) -> None:
    unfinished = state_file.with_suffix(".new")
    unfinished.write_text(json.dumps(state))
    unfinished.rename(state_file)


if __name__ == "__main__":
    main()
