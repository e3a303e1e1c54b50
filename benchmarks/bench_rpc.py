"""What a lease costs over the wire: round trips, rates, and growth with the pool.

    python benchmarks/bench_rpc.py benchmarks/results/rpc.json [--rounds 2000] [--seconds 3]

Targets (ratios in one run): lease, extend and release at most 1.3 times an empty gRPC echo of the same
kind of server on the same kind of socket, also for 8,192 blocks; the cost of a lease depends on the blocks
asked for, not on the pool.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpc_bench import growth, round_trip, throughput

TARGET_RATIO = 1.3
PACKAGES = ("grpcio", "protobuf", "kvd-pool")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a lease costs over the wire.")
    parser.add_argument("path", type=Path, help="where the JSON goes; a table goes beside it as .txt")
    parser.add_argument("--rounds", type=int, default=2000, help="samples of each operation")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each throughput run")
    args = parser.parse_args()
    results: dict[str, Any] = {"about": about()}
    with tempfile.TemporaryDirectory() as folder:
        results["round_trip"] = round_trip.measure(Path(folder) / "a", args.rounds)
        results["throughput"] = throughput.measure(Path(folder) / "b", args.seconds)
        results["growth"] = growth.measure(Path(folder) / "c", max(1, args.rounds // 5))
    args.path.parent.mkdir(parents=True, exist_ok=True)
    args.path.write_text(json.dumps(results, indent=2) + "\n")
    text = "\n".join(report(results)) + "\n"
    args.path.with_suffix(".txt").write_text(text)
    print(text, end="")


def about() -> dict[str, Any]:
    """Where, when and with what."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def report(results: Mapping[str, Any]) -> list[str]:
    """The same numbers for people."""
    facts, trip = results["about"], results["round_trip"]
    operations = [{"operation": name} | values for name, values in trip["operations"].items()]
    worst = max(row["p50_ratio"] for row in operations)
    return [
        f"{facts['date']}  {facts['command']}  commit {facts['commit']}  load {facts['load_average']:.1f}",
        f"{facts['cores']} x {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}, "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "",
        f"Round trips, {trip['rounds']} rounds, one call at a time, each after an echo",
        *table(operations),
        f"worst p50 ratio {worst:.2f} (target at most {TARGET_RATIO}); server CPU per call: "
        + ", ".join(f"{name} {cpu:g} us" for name, cpu in trip["cpu_us_per_call"].items()),
        "",
        "Throughput: one-block leases granted and released",
        *table(results["throughput"]),
        "",
        "Growth: live leases have holes between them, and in the pool of 40,016 blocks nothing else is free",
        *table(row for row in results["growth"] if "pool_blocks" in row),
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    listed = list(rows)
    lines = [list(listed[0]), *([str(value) for value in row.values()] for row in listed)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


if __name__ == "__main__":
    main()
