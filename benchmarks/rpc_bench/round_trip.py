"""lease / extend / release against an empty echo, in turns: a noisy neighbour hits both alike."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from rpc_bench.serving import BLOCK_SIZE, CALL_TIMEOUT_S, RawSession, cpu_seconds, running_echo, running_kvd

POOL, POOL_BLOCKS = "round-trip", 20_000
LARGE = 8192  # blocks: a 128k-token sequence
NOTHING = "health check of kvd"  # a call to the daemon's own server that does nothing
WARM_UP = 200  # rounds not counted

Samples = dict[str, list[float]]


def timed(samples: Samples, name: str, method: Callable[..., Any], request: Any) -> Any:
    """The answer to `request`; its microseconds are added to `samples`."""
    started = time.perf_counter_ns()
    answer = method(request, timeout=CALL_TIMEOUT_S)
    samples[name].append((time.perf_counter_ns() - started) / 1e3)
    return answer


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Per operation p50, p99 (microseconds) and their ratios to the echo's; CPU of both servers."""
    with running_kvd(folder) as endpoint, running_echo(folder) as (echo, echo_pid):
        session = RawSession(endpoint)
        session.create_pool(POOL, POOL_BLOCKS)
        for _ in range(WARM_UP):
            _round(session, echo, defaultdict(list))
        pids = {"kvd": session.daemon_pid(), "echo": echo_pid}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        samples: Samples = defaultdict(list)
        for _ in range(rounds):
            _round(session, echo, samples)
        cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        session.close()
    return {"rounds": rounds, "operations": summary(samples), "cpu_us_per_call": _per_call(samples, cpu)}


def _round(session: RawSession, echo: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", samples: Samples) -> None:
    def ask(name: str, method: Callable[..., Any], request: Any) -> Any:
        timed(samples, "echo", echo, b"")
        return timed(samples, name, method, request)

    stub = session.leases
    ask(NOTHING, session.health.Check, health_pb2.HealthCheckRequest())
    (small,) = ask("lease 1 block", stub.Lease, session.lease_request(POOL, [1])).leases
    ask("extend by 1 block", stub.Extend, session.extend_request(small, BLOCK_SIZE))
    ask("release 2 blocks", stub.Release, session.release_request([small]))
    (large,) = ask(f"lease {LARGE} blocks", stub.Lease, session.lease_request(POOL, [LARGE])).leases
    ask(f"release {LARGE} blocks", stub.Release, session.release_request([large]))


def summary(samples: Samples) -> dict[str, dict[str, float]]:
    """p50 and p99 in microseconds by operation, and how many times the echo's they are."""
    cuts = {name: statistics.quantiles(values, n=100) for name, values in samples.items()}
    base = cuts["echo"]
    return {
        name: {
            "p50_us": round(cut[49], 1),
            "p99_us": round(cut[98], 1),
            "p50_ratio": round(cut[49] / base[49], 3),
            "p99_ratio": round(cut[98] / base[98], 3),
        }
        for name, cut in cuts.items()
    }


def _per_call(samples: Samples, cpu: dict[str, float]) -> dict[str, float]:
    echoes = len(samples["echo"])
    calls = {"echo": echoes, "kvd": sum(map(len, samples.values())) - echoes}
    return {name: round(cpu[name] / calls[name] * 1e6, 1) for name in cpu}
