"""A production trace against a live kvd: what is found again, how fast, and how many sessions fit.

    python benchmarks/bench_trace.py [TRACE] [--json PATH] [--capacities 1000,5000] [--speed 0] [--workers 4]

Without a trace one is made up from a seed. Found shares are compared with a cache without an end and with
plain LRU of the same capacity, both computed from the trace. `--speed 60`: an hour in a minute; 0: as fast as
it goes. Sessions are leased until a pool of the same capacity refuses. The plot goes beside the JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_rpc import about, table
from rpc_bench.serving import RawSession, running_kvd
from trace_replay import candidates, live, orders, sessions, state
from trace_replay.compare import requests_of
from trace_replay.orders import CAPACITIES
from trace_replay.requests import Request, accesses, bound

PERCENTILES = (50, 90, 99)
SESSIONS_UP_TO = 10_000  # blocks; each session takes some 10 ms, so that more take minutes
COMMAND = "make bench-trace TRACE=the trace's path SESSIONS_UP_TO="


def main() -> None:
    parser = argparse.ArgumentParser(description="A production trace against a live kvd.")
    parser.add_argument("trace", nargs="?", help="JSON lines; default: made up")
    parser.add_argument("--json", type=Path, help="where the results go; a plot goes beside it")
    parser.add_argument("--capacities", default=",".join(map(str, CAPACITIES)), help="blocks of the trace")
    parser.add_argument("--orders", default="2q", help="eviction orders of kvd, e.g. 2q,lru")
    parser.add_argument("--requests", type=int, default=0, help="only so many (0: all)")
    parser.add_argument("--workers", type=int, default=4, help="processes")
    parser.add_argument("--speed", type=float, default=0.0, help="times as fast as the trace; 0: no pauses")
    parser.add_argument(
        "--sessions-up-to",
        type=int,
        default=SESSIONS_UP_TO,
        help="the largest capacity to fill with sessions",
    )
    args = parser.parse_args()
    requests = requests_of(args.trace)[: args.requests or None]
    results: dict[str, Any] = {
        "about": about() | {"command": COMMAND + str(args.sessions_up_to)},
        "trace": {"path": Path(args.trace).name if args.trace else "made up", "requests": len(requests)},
        "blocks": accesses(requests),
        "bound": bound(requests),
        "rows": [],
        "sessions": [],
    }
    print(
        f"{len(requests)} requests, {results['blocks']} blocks; a cache without an end {results['bound']:.1%}"
    )
    for capacity in map(int, args.capacities.split(",")):
        plain = candidates.found_blocks(requests, capacity, "LRU")
        for order in args.orders.split(","):
            row = measured(requests, capacity, order, args) | {"plain_lru": plain / results["blocks"]}
            results["rows"].append(row)
            print(*table([_shown(row)]), sep="\n", flush=True)
        if capacity <= args.sessions_up_to:
            results["sessions"].append({"capacity": capacity, **sessions_alive(requests, capacity)})
            print(*table([_shown_sessions(results["sessions"][-1])]), sep="\n", flush=True)
        if args.json is not None:  # after each: what was measured is kept if the next one fails
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(results, indent=2) + "\n")
            plot(results, args.json.with_suffix(".png"))


def measured(
    requests: Sequence[Request], capacity: int, order: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One replay on a kvd of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-trace-") as folder,
        running_kvd(Path(folder), "--eviction", order) as endpoint,
    ):
        session = RawSession(endpoint)
        pid = session.daemon_pid()
        before_kib, started = resident_kib(pid), time.monotonic()
        seen = live.replay(Path(folder), requests, capacity, args.workers, args.speed)
        duration, grown_kib = time.monotonic() - started, resident_kib(pid) - before_kib
        session.close()
    return {
        "capacity": capacity,
        "order": order,
        "found": seen.found_blocks / accesses(requests),
        "offline": orders.found_blocks(requests, capacity, order) / accesses(requests),
        "requests_a_second": len(requests) / duration,
        "calls_ms": {name: milliseconds(durations) for name, durations in seen.calls.items()},
        "daemon_grew_kib": grown_kib,
        "state_bytes_a_block": state.bytes_a_block(capacity, order),
    }


def resident_kib(pid: int) -> int:
    """Memory of a process that is its own, with what gRPC, snapshots and the allocator hold of it."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0])


def milliseconds(durations: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(durations, p)) * 1000 for p in PERCENTILES}


def sessions_alive(requests: Sequence[Request], capacity: int) -> dict[str, Any]:
    """On a kvd of its own, which has room for one pool of that capacity."""
    memory = ("--host-memory", f"{sessions.pool_bytes(capacity)}B")
    with tempfile.TemporaryDirectory(prefix="kvd-trace-") as folder, running_kvd(Path(folder), *memory):
        return sessions.that_fit(Path(folder), requests, capacity)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    calls = {f"{name} p50/p99 ms": f"{t['p50']:.2f}/{t['p99']:.2f}" for name, t in row["calls_ms"].items()}
    return {
        "capacity": row["capacity"],
        "order": row["order"],
        "found": f"{row['found']:.1%}",
        "offline": f"{row['offline']:.1%}",
        "plain LRU": f"{row['plain_lru']:.1%}",
        "requests/s": f"{row['requests_a_second']:.0f}",
        **calls,
        "state B/block": f"{row['state_bytes_a_block']:.0f}",
    }


def _shown_sessions(row: Mapping[str, Any]) -> dict[str, Any]:
    whole, compressed = row["whole"], row["compressed"]
    return {
        "capacity": row["capacity"],
        "sessions alive": f"{whole['sessions']:,}",
        "blocks each": whole["blocks_each"],
        "compressed": f"{compressed['sessions']:,}",
        "blocks each, compressed": compressed["blocks_each"],
        "ratio": row["ratio"],
        "by": row["policy"],
    }


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Share of blocks found over the capacity: live by order, plain LRU, and the bound."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    rows = results["rows"]
    for order in dict.fromkeys(row["order"] for row in rows):
        mine = [row for row in rows if row["order"] == order]
        axes.plot(
            [row["capacity"] for row in mine],
            [100 * row["found"] for row in mine],
            marker="o",
            label=f"kvd, {order}, live",
        )
    plain = {row["capacity"]: 100 * row["plain_lru"] for row in rows}
    axes.plot([*plain], [*plain.values()], "k--", marker="x", linewidth=1, label="plain LRU, computed")
    axes.axhline(100 * results["bound"], color="grey", linewidth=1, label="cache without an end")
    axes.set(
        xscale="log", xlabel="blocks that fit (512 tokens each)", ylabel="% of blocks found", ylim=(0, None)
    )
    axes.set_xticks([*plain], [f"{capacity:,}" for capacity in plain], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    trace = results["trace"]
    figure.supxlabel(_caption(results["sessions"]), fontsize=8)
    axes.set_title(f"Prefix reuse of a trace ({trace['path']}, {trace['requests']:,} requests)", fontsize=10)
    figure.savefig(path, dpi=120)


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many sessions were alive at once."""
    told = (
        f"{row['capacity']:,}: {row['whole']['sessions']:,} / {row['compressed']['sessions']:,}"
        for row in rows
    )
    what = f"sessions of the trace alive at once, whole / compressed by {rows[0]['policy']}" if rows else ""
    return "\n".join([what, "    ".join(told)]).strip()


if __name__ == "__main__":
    main()
