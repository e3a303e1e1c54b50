"""A trace against a live kvd: worker processes that match, lease, write, seal and release for every request.

A block of the trace is a block of a small pool; its keys and values hold its id, which is read back where a
match promises it. Workers take the next request from a counter, so that requests begin in the trace's order.
"""

import contextlib
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np

import kvd_client
from kvd.limits import HASH_BYTES
from kvd_client import KVSpec

from .requests import Request

BLOCK_SIZE = 16  # tokens of a kvd block, which stands for 512 of the trace
SPEC = KVSpec(1, 1, head_dim_k=8, head_dim_v=8, dtype="float32", block_size=BLOCK_SIZE)
POOL = "trace"
WAIT_S = 60.0  # for blocks that other workers hold
CALL_TIMEOUT_S = 120.0
SALT = 1 << 24  # ids below are exact in float32


@dataclass
class Measured:
    """What a worker saw: leading blocks found, and how long each kind of call took, in seconds."""

    found_blocks: int = 0
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.calls[name].append(time.perf_counter() - started)

    def add(self, other: "Measured") -> None:
        self.found_blocks += other.found_blocks
        for name, durations in other.calls.items():
            self.calls[name] += durations


class Worker:
    """One session that serves requests."""

    def __init__(self, run_dir: Path, capacity: int) -> None:
        self._client = kvd_client.connect(run_dir, timeout=CALL_TIMEOUT_S)
        self._pool = self._client.pool(POOL, SPEC, blocks=capacity)
        self._keys, self._values = self._pool.layer(0, framework="numpy")
        self.measured = Measured()

    def serve(self, request: Request) -> None:
        """Raises AssertionError if a block that was found holds something else."""
        measured, pool = self.measured, self._pool
        names = [
            blake2b(block.to_bytes(8, "big"), digest_size=HASH_BYTES).digest() for block in request.blocks
        ]
        with measured.call("Match"):
            match = pool.match(names, ttl=WAIT_S)
        found = len(match)
        tokens = len(names) * BLOCK_SIZE
        with measured.call("Lease"):
            lease = pool.lease(tokens, prefix=match, lease_ahead=0, wait=WAIT_S)
        lease.extend(tokens - lease.length)
        ids = np.array(request.blocks, np.float32)[:, None, None, None]
        table = lease.block_table
        for plane in (self._keys, self._values):
            assert (plane[table[:found]] == ids[:found]).all(), "a block that was found holds other bytes"
            plane[table[found:]] = ids[found:]
        lease.commit(tokens - lease.length)
        with measured.call("Seal"):
            lease.seal(names)
        with measured.call("Release"):
            lease.release()
        measured.found_blocks += found

    def close(self) -> None:
        self._client.close()


def replay(run_dir: Path, requests: Sequence[Request], capacity: int, workers: int, speed: float) -> Measured:
    """All requests by so many processes; `speed` times as fast as they came, or as fast as it goes (0)."""
    assert max(max(request.blocks) for request in requests) < SALT
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    plan, following = Plan(run_dir, requests, capacity, speed), context.Value("q", 0)
    measured = Measured()
    with ProcessPoolExecutor(workers, context, _begin, (plan, following)) as executor:
        for future in [executor.submit(_work) for _ in range(workers)]:
            measured.add(future.result())
    return measured


@dataclass(frozen=True)
class Plan:
    """What all workers of a replay do together."""

    run_dir: Path
    requests: Sequence[Request]
    capacity: int
    speed: float


_told: list[tuple[Plan, "Synchronized[int]"]] = []
"""In a worker process: what it was told when it began."""


def _begin(plan: Plan, following: "Synchronized[int]") -> None:
    _told.append((plan, following))


def _work() -> Measured:
    """Serve one request after the other until none is left."""
    plan, following = _told[0]
    worker, started = Worker(plan.run_dir, plan.capacity), time.monotonic()
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(plan.requests):
            break
        request = plan.requests[number]
        if plan.speed:
            time.sleep(max(0.0, started + request.time_ms / 1000 / plan.speed - time.monotonic()))
        worker.serve(request)
    worker.close()
    return worker.measured
