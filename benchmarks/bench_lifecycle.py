"""How long operators wait: start to ready with an 8 GiB pool, a killed worker's blocks back, a killed
daemon's leases usable again, SIGTERM to exit.

    python benchmarks/bench_lifecycle.py [--rounds 5] [--json PATH]

Medians and worst of the rounds, wall seconds; each round is a real `kvd` of its own.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil

import kvd_client

MEMORY = "8GiB"
POOL_BLOCKS = 4095  # of 2 MiB (Llama-3-8B, 16 tokens, bf16), with the null block just 8 GiB
LEASED_TOKENS = 4096
DEADLINE_SECONDS = 30.0
SPEC = kvd_client.KVSpec(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
WORKER = """
import sys, time, kvd_client
client = kvd_client.connect(sys.argv[1])
lease = client.pool("bench").lease(tokens=int(sys.argv[2]))
print("leased", flush=True)
time.sleep(60)
"""


def one_round() -> dict[str, float]:
    """Seconds by name."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as run_dir:
        command = [str(Path(sys.executable).with_name("kvd")), "--host-memory", MEMORY, "--run-dir", run_dir]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as kvd:
            assert kvd.stdout is not None
            assert kvd.stdout.readline()
            ready = time.perf_counter()
            with kvd_client.connect(run_dir) as client:
                pool = client.pool("bench", SPEC, blocks=POOL_BLOCKS)
                created = time.perf_counter()
                back = killed_worker(run_dir, pool)
                on = killed_daemon(kvd.pid, pool)
            terminated = time.perf_counter()
            kvd.terminate()
            assert kvd.wait(DEADLINE_SECONDS) == 0
            return {
                "start to ready": ready - started,
                "create and map an 8 GiB pool": created - ready,
                "SIGKILL of a worker to its blocks leased again": back,
                "SIGKILL of the daemon to its leases used again": on,
                "SIGTERM to exit": time.perf_counter() - terminated,
            }


def killed_worker(run_dir: str, pool: kvd_client.Pool) -> float:
    """Seconds from SIGKILL until all the blocks it left can be leased by this process."""
    command = [sys.executable, "-c", WORKER, run_dir, str(LEASED_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline()
        everything_but_reserve = (POOL_BLOCKS - 16) * SPEC.block_size
        killed = time.perf_counter()
        os.kill(worker.pid, signal.SIGKILL)
        return _until(lambda: pool.lease(tokens=everything_but_reserve)) - killed


def killed_daemon(supervisor_pid: int, pool: kvd_client.Pool) -> float:
    """Seconds from SIGKILL until a lease of before has grown and its bytes were read."""
    [daemon] = psutil.Process(supervisor_pid).children()
    with pool.lease(tokens=LEASED_TOKENS, lease_ahead=0) as lease:
        view, _ = pool.layer(0, "numpy")
        view[lease.block_table] = 7
        lease.extend(LEASED_TOKENS)
        lease.commit(LEASED_TOKENS)
        killed = time.perf_counter()
        daemon.kill()
        lease.extend(1)
        keys, _ = lease.gather(0, "numpy")
        took = time.perf_counter() - killed
        assert (keys == 7).all()
        assert not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE
        return took


def _until(lease: Callable[[], kvd_client.Lease]) -> float:
    give_up = time.perf_counter() + DEADLINE_SECONDS
    while True:
        try:
            with lease():
                return time.perf_counter()
        except kvd_client.PoolExhaustedError:
            if time.perf_counter() > give_up:
                raise


def main() -> None:
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = [one_round() for _ in range(options.rounds)]
    table = {name: [each[name] for each in rounds] for name in rounds[0]}
    print(f"{'':50}{'median':>10}{'worst':>10}")
    for name, seconds in table.items():
        print(f"{name:50}{statistics.median(seconds):>9.3f}s{max(seconds):>9.3f}s")
    if options.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"about": about, "seconds": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
