"""What it costs that a device's state outlives its daemon: writing, reading again, snapshots.

    python benchmarks/bench_journal.py --json benchmarks/results/journal.json [--rounds 20]

All in one run, in memory (/dev/shm). Times are of this thread's CPU unless they say wall: on a machine that
others use, wall times tell of them. SQLite: one table, WAL, synchronous=OFF, a transaction per record,
which is as durable against the death of a process as the journal is.
"""

import argparse
import gc
import json
import os
import shlex
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from kvd.spec import KVSpec
from kvd_daemon.core import Device, LeaseWish, Limits, Progress, SessionIdentity
from kvd_daemon.core.image import capture
from kvd_daemon.journal import RecordingDevice, Reply, open_journal
from kvd_daemon.journal.codec import pieces
from kvd_daemon.main import GC_THRESHOLDS

SPEC = KVSpec(layers=32, kv_heads=8, head_dim_k=128, head_dim_v=128)
RECORD = bytes(range(200))  # bytes; a lease with its reply
CALLS = 1_000  # in a round
BLOCKS, LEASES, BLOCKS_PER_LEASE = 1_000_000, 10_000, 16
LATER = 10**18
TARGET_US = 20.0  # a lease call's share for the journal
TARGET_PAUSE_MS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description="What the journal costs.")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--rounds", type=int, default=20, help="of 1,000 calls each")
    args = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        results = {
            "about": about(),
            "append_us": appends(folder, args.rounds),
            "lease_call_us": calls(folder, args.rounds),
            "replay": replay(folder),
            "snapshot": snapshot(folder, args.rounds),
        }
    finally:
        shutil.rmtree(folder)
    args.json.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def about() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "sqlite": sqlite3.sqlite_version,
    }


def best_us(call: Callable[[], object], rounds: int, count: int = CALLS) -> dict[str, float]:
    """CPU microseconds of one call: of the quickest round, and of the median one."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(count):
            call()
        times.append((time.thread_time() - began) / count * 1e6)
    return {"best": round(min(times), 2), "median": round(median(times), 2)}


def appends(folder: Path, rounds: int) -> dict[str, Any]:
    """One record of 200 bytes: in the journal, and in SQLite."""
    journal = fresh(folder / "appends").journal
    assert journal is not None
    ours = best_us(lambda: journal.append(RECORD), rounds)
    journal.close()
    table = sqlite3.connect(folder / "sqlite.db", isolation_level=None)
    table.execute("PRAGMA journal_mode=WAL")
    table.execute("PRAGMA synchronous=OFF")
    table.execute("CREATE TABLE records (number INTEGER PRIMARY KEY, content BLOB)")
    insert = "INSERT INTO records (content) VALUES (?)"
    theirs = best_us(lambda: table.execute(insert, (RECORD,)), rounds)
    table.close()
    return {"journal": ours, "sqlite": theirs, "ratio": round(theirs["best"] / ours["best"], 1)}


def fresh(folder: Path) -> RecordingDevice:
    return open_journal(folder / "journal", 1 << 62, Limits()).device


def furnished(device: Device, blocks: int) -> Device:
    device.create_pool("pool", SPEC, blocks, "id")
    device.open_session(SessionIdentity("worker", "tenant", 1, 1), LATER, 0)
    return device


def calls(folder: Path, rounds: int) -> dict[str, Any]:
    """A call, from a cycle of lease, extend and release: without a journal, with it, and with replies."""
    plain = best_us(cycle(furnished(Device(1 << 62), 10_000)), rounds)
    recording = fresh(folder / "calls")
    furnished(recording, 10_000)
    recorded = best_us(cycle(recording), rounds)
    answered = best_us(answering(recording), rounds)
    parts = {"plain": plain, "recorded": recorded, "recorded_with_reply": answered}
    per_call = {name: {kind: round(us / 3, 2) for kind, us in part.items()} for name, part in parts.items()}
    journal_us = round(per_call["recorded_with_reply"]["best"] - per_call["plain"]["best"], 2)
    return {**per_call, "journal": journal_us, "target": TARGET_US, "met": journal_us < TARGET_US}


def cycle(device: Device) -> Callable[[], object]:
    wishes = [LeaseWish(160)]

    def run() -> None:
        lease_id = device.lease("worker", "pool", wishes, 5).leases[0].lease_id
        device.extend("worker", [(Progress(lease_id, 1, 160, 160), 16)], 5)
        device.release("worker", [lease_id])

    return run


def answering(device: RecordingDevice) -> Callable[[], object]:
    """As a call of a worker does: events and reply are one record."""
    wishes, reply = [LeaseWish(160)], Reply("worker", "0f" * 16, bytes(16), "LeaseRequest", bytes(60))

    def run() -> None:
        with device.batch():
            lease_id = device.lease("worker", "pool", wishes, 5).leases[0].lease_id
            device.replied(reply)
        with device.batch():
            device.extend("worker", [(Progress(lease_id, 1, 160, 160), 16)], 5)
            device.replied(reply)
        with device.batch():
            device.release("worker", [lease_id])
            device.replied(reply)

    return run


def replay(folder: Path) -> dict[str, Any]:
    """A segment as full as it gets before a snapshot takes its place."""
    device = fresh(folder / "replay")
    furnished(device, 10_000)
    run, journal = answering(device), device.journal
    assert journal is not None
    first = next(journal.folder.glob("*.segment"))
    while next(journal.folder.glob("*.segment")) == first:  # one file as long as there was no rotation
        copy = folder / "full"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(journal.folder, copy)
        for _ in range(500):
            run()
    journal.close()
    began = time.thread_time()
    found = open_journal(folder / "full", 1 << 62, Limits()).found
    seconds = time.thread_time() - began
    return {
        "records": found.records,
        "cpu_s": round(seconds, 3),
        "wall_s": round(found.duration_ns / 1e9, 3),
        "records_per_cpu_s": round(found.records / seconds),
    }


def snapshot(folder: Path, rounds: int) -> dict[str, Any]:
    """Of a million blocks in ten thousand leases: the pause on the loop, the work of the thread, and back."""
    device = fresh(folder / "snapshot")
    furnished(device, BLOCKS)
    for _ in range(LEASES // 1000):
        device.lease("worker", "pool", [LeaseWish(16 * BLOCKS_PER_LEASE)] * 1000, 5)
    pauses = best_us(lambda: capture(device), rounds, 1)
    image = capture(device)
    began = time.thread_time()
    written_bytes = sum(memoryview(piece).nbytes for piece in pieces(image.plain()))
    encode_ms = (time.thread_time() - began) * 1e3
    assert device.journal is not None
    device.journal.snapshot_now()
    device.journal.close()
    began = time.thread_time()
    found = open_journal(folder / "snapshot" / "journal", 1 << 62, Limits()).found
    recovery_ms = (time.thread_time() - began) * 1e3
    pause_ms = pauses["best"] / 1e3
    return {
        "blocks": BLOCKS,
        "leases": LEASES,
        "pause_ms": {"best": round(pause_ms, 2), "median": round(pauses["median"] / 1e3, 2)},
        "target_ms": TARGET_PAUSE_MS,
        "met": pause_ms < TARGET_PAUSE_MS,
        "encode_ms": round(encode_ms, 1),
        "bytes": written_bytes,
        "recovery_cpu_ms": round(recovery_ms, 1),
        "recovery_wall_s": round(found.duration_ns / 1e9, 3),
    }


if __name__ == "__main__":
    main()
