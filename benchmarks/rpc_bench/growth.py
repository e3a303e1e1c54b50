"""Does a lease cost more in a larger pool, or beside more live leases? Pools take turns, call by call."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from rpc_bench.round_trip import Samples, timed
from rpc_bench.serving import CALL_TIMEOUT_S, RawSession, cpu_seconds, running_kvd

from kvd.v1 import kvd_pb2 as pb

POOLS = (  # (blocks, live leases)
    (10_000, 0),
    (10_000, 1_000),
    (40_016, 10_000),  # leases and holes fill it up to the reserve of 16: runs are LIVE_BLOCKS long
    (100_000, 10_000),
    (1_000_000, 10_000),
)
WANTED = (1, 64, 1024)  # blocks of one lease
LEASES_PER_CALL = 1024  # the daemon's limit
LIVE_BLOCKS = 2  # of a live lease
WARM_UP = 50


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One row per pool and number of blocks: p50 of lease and release in microseconds."""
    with running_kvd(folder) as endpoint:
        session = RawSession(endpoint)
        names = {pool: f"growth-{pool[0]}-{pool[1]}" for pool in POOLS}
        for (blocks, live), name in names.items():
            session.create_pool(name, blocks)
            _fill_in_between(session, name, live)
        samples: Samples = defaultdict(list)
        before = cpu_seconds(session.daemon_pid())
        for round_index in range(rounds + WARM_UP):
            for name in names.values():
                _sample(session, name, samples if round_index >= WARM_UP else defaultdict(list))
        cpu = cpu_seconds(session.daemon_pid()) - before
        session.close()
    rows = [_row(pool, name, wanted, samples) for pool, name in names.items() for wanted in WANTED]
    calls = 2 * len(WANTED) * len(POOLS) * (rounds + WARM_UP)
    return [*rows, {"daemon_cpu_us_per_call": round(cpu / calls * 1e6, 1)}]


def _fill_in_between(session: RawSession, pool: str, live: int) -> None:
    """`live` leases with holes of their size between them: the free blocks are in as many runs."""
    leases: list[pb.LeaseState] = []
    while len(leases) < 2 * live:
        count = min(LEASES_PER_CALL, 2 * live - len(leases))
        request = session.lease_request(pool, [LIVE_BLOCKS] * count)
        leases += session.leases.Lease(request, timeout=CALL_TIMEOUT_S).leases
    for first in range(0, len(leases), 2 * LEASES_PER_CALL):
        release = session.release_request(leases[first : first + 2 * LEASES_PER_CALL : 2])
        session.leases.Release(release, timeout=CALL_TIMEOUT_S)


def _sample(session: RawSession, pool: str, samples: Samples) -> None:
    for wanted in WANTED:
        lease = session.lease_request(pool, [wanted])
        granted = timed(samples, f"{pool} lease {wanted}", session.leases.Lease, lease).leases
        samples[f"{pool} runs {wanted}"].append(len(granted[0].appended))
        release = session.release_request(granted)
        timed(samples, f"{pool} release {wanted}", session.leases.Release, release)


def _row(pool: tuple[int, int], name: str, wanted: int, samples: Samples) -> dict[str, Any]:
    columns = ("lease", "release", "runs")
    medians = {what: statistics.median(samples[f"{name} {what} {wanted}"]) for what in columns}
    return {
        "pool_blocks": pool[0],
        "live_leases": pool[1],
        "blocks_wanted": wanted,
        "runs": round(medians["runs"]),
        "lease_p50_us": round(medians["lease"], 1),
        "release_p50_us": round(medians["release"], 1),
    }
