"""Leases per second with 1, 8 and 64 workers, each with a session and a connection of its own."""

import multiprocessing
import threading
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from rpc_bench.serving import CALL_TIMEOUT_S, RawSession, cpu_seconds, running_kvd

from kvd_client._endpoint import Endpoint

POOL, POOL_BLOCKS = "throughput", 100_000
MAX_PROCESSES = 8  # beyond it workers are threads of these: 64 interpreters would measure the machine
JOIN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Load:
    """`workers` that lease and release `leases_per_call` one-block leases in a call, for `seconds`."""

    workers: int
    leases_per_call: int
    seconds: float


LOADS = ((1, 1), (8, 1), (64, 1), (1, 64), (8, 64))


def measure(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """One row per load: leases granted (and released) per second, and CPU seconds beside wall time."""
    with running_kvd(folder) as endpoint:
        session = RawSession(endpoint)
        session.create_pool(POOL, POOL_BLOCKS)
        pid = session.daemon_pid()
        rows = [_run(endpoint, Load(*load, seconds), pid) for load in LOADS]
        session.close()
    return rows


def _run(endpoint: Endpoint, load: Load, daemon_pid: int) -> dict[str, Any]:
    processes = min(load.workers, MAX_PROCESSES)
    context = multiprocessing.get_context("spawn")
    started, results = context.Barrier(processes + 1), context.Queue()
    arguments = (endpoint, load, load.workers // processes, started, results)
    workers = [context.Process(target=_worker_process, args=arguments) for _ in range(processes)]
    for worker in workers:
        worker.start()
    started.wait(JOIN_TIMEOUT_S)
    before, began = cpu_seconds(daemon_pid), time.perf_counter()
    told = [results.get(timeout=JOIN_TIMEOUT_S) for _ in workers]
    wall, daemon_cpu = time.perf_counter() - began, cpu_seconds(daemon_pid) - before
    for worker in workers:
        worker.join(JOIN_TIMEOUT_S)
    leases = sum(count for count, _ in told)
    return {
        "workers": load.workers,
        "processes": processes,
        "leases_per_call": load.leases_per_call,
        "leases_per_second": round(leases / wall, 1),
        "wall_seconds": round(wall, 3),
        "daemon_cpu_seconds": round(daemon_cpu, 3),
        "workers_cpu_seconds": round(sum(cpu for _, cpu in told), 3),
        "daemon_cpu_us_per_lease": round(daemon_cpu / leases * 1e6, 1),
    }


def _worker_process(
    endpoint: Endpoint, load: Load, threads: int, started: Barrier, results: "Queue[tuple[int, float]]"
) -> None:
    sessions = [RawSession(endpoint) for _ in range(threads)]
    counts = [0] * threads
    running = [
        threading.Thread(target=_lease_and_release, args=(session, load, counts, index))
        for index, session in enumerate(sessions)
    ]
    started.wait(JOIN_TIMEOUT_S)
    before = time.process_time()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    results.put((sum(counts), time.process_time() - before))
    for session in sessions:
        session.close()


def _lease_and_release(session: RawSession, load: Load, counts: list[int], index: int) -> None:
    stub, until = session.leases, time.perf_counter() + load.seconds
    while time.perf_counter() < until:
        request = session.lease_request(POOL, [1] * load.leases_per_call)
        granted = stub.Lease(request, timeout=CALL_TIMEOUT_S).leases
        stub.Release(session.release_request(granted), timeout=CALL_TIMEOUT_S)
        counts[index] += len(granted)
