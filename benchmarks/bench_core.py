"""What the state machine alone costs, and hashing a prompt: no wire, no clock, no disk.

    python benchmarks/bench_core.py --json benchmarks/results/core.json [--rounds 2000]

Lease, extend by a block, release: microseconds of each, and how they grow from ten thousand to a million
blocks, beside ten thousand live leases, and in a pool whose free blocks all lie alone. Medians of batches,
and of these the least: whatever else the machine does only adds.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvd.spec import KVSpec
from kvd_client import prefix
from kvd_daemon.core import Device, Lease, LeaseWish, Progress, SessionIdentity

BLOCK_SIZE = 16  # tokens
TINY = KVSpec(1, 1, 1, 1, dtype="fp8", block_size=BLOCK_SIZE)  # 32 bytes a block: a million fit anywhere
POOLS = ((10_000, 0), (10_000, 1_000), (100_000, 10_000), (1_000_000, 10_000))  # (blocks, live leases)
WANTED = (1, 64, 1024, 8192)  # blocks of one lease; the last is a sequence of 128k tokens
SCATTERED = (40_000, (1, 64, 1024))  # blocks of a pool of which every second one is free; blocks wanted
LIVE_BLOCKS = 2  # of a live lease; holes between them are as large
LEASES_PER_CALL = 1000  # below the core's limit
BATCHES = 8  # the least of their medians counts
HASHED_TOKENS, VOCABULARY = 1 << 20, 128_000
NOW_NS, TTL_NS = 0, 1 << 62
SESSION = "bench"


@dataclass(frozen=True)
class Bed:
    """A device with one pool and some live leases."""

    device: Device
    blocks: int
    live: int

    @classmethod
    def made(cls, blocks: int, live: int, live_blocks: int = LIVE_BLOCKS) -> "Bed":
        """`live` leases, and a hole of the same size behind each."""
        device = Device(1 << 40)
        device.create_pool("pool", TINY, blocks, "id")
        device.open_session(SessionIdentity(SESSION, "tenant", 1, 1), TTL_NS, NOW_NS)
        wish, leases = LeaseWish(live_blocks * BLOCK_SIZE), list[Lease]()
        while len(leases) < 2 * live:
            count = min(LEASES_PER_CALL, 2 * live - len(leases))
            leases += device.lease(SESSION, "pool", [wish] * count, NOW_NS).leases
        holes = [lease.lease_id for lease in leases[1::2]]
        for first in range(0, len(holes), LEASES_PER_CALL):
            device.release(SESSION, holes[first : first + LEASES_PER_CALL])
        return cls(device, blocks, live)

    def cycle(self, wanted: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The three calls in turn, each made when the one before it has answered."""
        device, tokens = self.device, wanted * BLOCK_SIZE
        wish = [LeaseWish(tokens)]
        yield "lease", lambda: device.lease(SESSION, "pool", wish, NOW_NS)
        lease_id = device._registry.last_lease_id
        items = [(Progress(lease_id, 1, tokens, tokens), BLOCK_SIZE)]
        yield "extend", lambda: device.extend(SESSION, items, NOW_NS)
        yield "release", lambda: device.release(SESSION, [lease_id])


def microseconds(bed: Bed, wanted: int, rounds: int) -> dict[str, float]:
    """Of each call."""
    medians: dict[str, list[float]] = defaultdict(list)
    for _ in range(BATCHES):
        spent: dict[str, list[int]] = defaultdict(list)
        for _ in range(rounds):
            for name, call in bed.cycle(wanted):
                began = time.perf_counter_ns()
                call()
                spent[name].append(time.perf_counter_ns() - began)
        for name, samples in spent.items():
            medians[name].append(statistics.median(samples) / 1e3)
    return {name: min(values) for name, values in medians.items()}


def row(bed: Bed, wanted: int, rounds: int) -> dict[str, Any]:
    cost = microseconds(bed, wanted, rounds)
    return {
        "pool_blocks": bed.blocks,
        "live_leases": bed.live,
        "blocks_wanted": wanted,
        **{f"{name}_us": round(value, 2) for name, value in cost.items()},
        **{f"{name}s_per_second": round(1e6 / value) for name, value in cost.items()},
    }


def measure(rounds: int) -> dict[str, Any]:
    """Rows by pool, live leases and blocks wanted."""
    beds = [Bed.made(blocks, live) for blocks, live in POOLS]
    growth = [row(bed, wanted, rounds) for bed in beds for wanted in WANTED if wanted < bed.blocks // 2]
    blocks, wanted_blocks = SCATTERED
    alone = Bed.made(blocks, blocks // 2 - 16, live_blocks=1)  # the reserve of 16 stays one run
    scattered = [row(alone, wanted, max(1, rounds // wanted)) for wanted in wanted_blocks]
    return {"growth": growth, "scattered": scattered, "hashing": [hashing()]}


def hashing() -> dict[str, Any]:
    """What the client library needs for the prefix hashes of a prompt."""
    tokens, spent = np.arange(HASHED_TOKENS) % VOCABULARY, list[float]()
    for _ in range(BATCHES):
        began = time.perf_counter()
        prefix.hashes(tokens, BLOCK_SIZE, "model")
        spent.append(time.perf_counter() - began)
    best = HASHED_TOKENS / min(spent) / 1e6
    return {"tokens": HASHED_TOKENS, "block_size": BLOCK_SIZE, "million_tokens_per_second": round(best, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the state machine alone costs.")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--rounds", type=int, default=1000, help="cycles in a batch (fewer of many pieces)")
    args = parser.parse_args()
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
    results = {"about": about, "rounds": args.rounds, **measure(args.rounds)}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=2) + "\n")
    for name in ("growth", "scattered", "hashing"):
        print(name)
        for line in results[name]:
            print("  ".join(f"{key} {value:>9}" for key, value in line.items()))


if __name__ == "__main__":
    main()
