"""Run the quality measurements: starts kvd and inference workers, keeps what was measured, can go on later.

    python -m quality.run [--suites span,grid,prose,agnostic] [--minutes 60] [--workers 2]

Results go to $KVD_CACHE/quality/results.jsonl, one line a job; a job that is there is not run again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .jobs import SUITES, Job

ROOT = Path(__file__).resolve().parents[2]
HOST_MEMORY = "6GiB"
STOP_SECONDS = 20


def results_file() -> Path:
    return Path(os.environ.get("KVD_CACHE", ROOT / ".cache")) / "quality" / "results.jsonl"


def finished(path: Path) -> list[dict[str, Any]]:
    """Jobs measured so far: {"done": key, "results": [...]}."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def kvd_running() -> Iterator[dict[str, str]]:
    """A real kvd in a run dir of its own; the environment for its workers. Stops it on SIGTERM too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="kvd-quality-") as run_dir:
        kvd = str(Path(sys.executable).with_name("kvd"))
        command = [kvd, "--host-memory", HOST_MEMORY, "--run-dir", run_dir]
        log = Path(run_dir) / "kvd.log"
        with (
            log.open("w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as daemon,
        ):
            assert daemon.stdout is not None
            if not daemon.stdout.readline():
                sys.exit(f"kvd did not start: {log.read_text()}")
            try:
                paths = os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT / "examples")))
                yield {**os.environ, "KVD_RUN_DIR": run_dir, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            finally:
                daemon.terminate()
                daemon.wait(STOP_SECONDS)


class Runner:
    """Feeds jobs to worker processes, one thread each, and keeps every result at once."""

    def __init__(self, jobs: list[Job], path: Path, deadline: float) -> None:
        self._jobs, self._path, self._deadline = deque(jobs), path, deadline
        self._lock = threading.Lock()
        self._total, self._count, self._started = len(jobs), 0, time.monotonic()

    def serve(self, name: str, environment: dict[str, str]) -> None:
        """Run jobs in one worker process until none is left or time is up."""
        command = [sys.executable, "-m", "quality.worker", name]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            if not worker.stdout.readline():
                raise RuntimeError(f"worker {name} did not start")
            while self._jobs and time.monotonic() < self._deadline:
                with self._lock:
                    job = self._jobs.popleft()
                worker.stdin.write(json.dumps(job.as_dict()) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    raise RuntimeError(f"worker {name} died in {job.key}")
                self._keep(line)
            worker.stdin.close()

    def _keep(self, line: str) -> None:
        with self._lock, self._path.open("a") as results:
            results.write(line)
            self._count += 1
            minutes = (time.monotonic() - self._started) / 60
            print(f"{self._count} of {self._total} jobs, {minutes:.1f} min", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is not measured yet, as long as time lasts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", default="span,prose,agnostic,grid")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    path = results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {entry["done"] for entry in finished(path)}
    jobs = [job for suite in options.suites.split(",") for job in SUITES[suite]() if job.key not in known]
    runner = Runner(jobs, path, time.monotonic() + 60 * options.minutes)
    with kvd_running() as environment:
        threads = [
            threading.Thread(target=runner.serve, args=(f"quality-{number}", environment))
            for number in range(options.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
