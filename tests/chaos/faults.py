"""What goes wrong on a machine at 3 a.m., one function each: it inflicts the fault and answers how many
seconds the recovery took, or None where there is nothing to wait for.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .inject.kill_points import CLOCK_FILE, POINTS
from .stage import TTL_S, RunningWorker, Stage

FULL_DISK_S = 1.0  # how long the run dir's file system stays full
MAX_JUMP_S = 10 * 365 * 86400.0  # of the wall clock, both ways

Fault = Callable[[Stage, random.Random], float | None]


def kill_worker(stage: Stage, rng: random.Random) -> float:
    """Its session and with it its blocks are back as soon as nobody lists it any more."""
    worker = _any_worker(stage, rng)
    worker.process.kill()
    took_s = stage.recovered_after(
        lambda: worker.process.pid not in stage.session_pids(), "the session of a killed worker to end"
    )
    worker.process.wait()
    stage.workers.remove(worker)
    stage.start_worker()
    return took_s


def stop_worker(stage: Stage, rng: random.Random) -> None:
    """Slow is not dead: nothing may happen to it."""
    _freeze(_any_worker(stage, rng).process.pid, rng.uniform(0.1, 1.0))


def stop_worker_beyond_ttl(stage: Stage, rng: random.Random) -> None:
    """Its leases expire, but nobody gets its blocks while it lives."""
    _freeze(_any_worker(stage, rng).process.pid, TTL_S + 2.0)


def kill_kernel_worker(stage: Stage, rng: random.Random) -> float:
    return _kill_and_await_kernel(stage, signal.SIGKILL)


def stop_kernel_worker(stage: Stage, rng: random.Random) -> float:
    """It hangs: it must be found out and replaced."""
    return _kill_and_await_kernel(stage, signal.SIGSTOP)


def kill_disk_worker(stage: Stage, rng: random.Random) -> float:
    """What it was moving stays where it was."""
    stage.recovered_after(lambda: bool(stage.disk_worker()), "a disk worker")
    pid = stage.disk_worker()
    os.kill(pid, signal.SIGKILL)
    return stage.recovered_after(lambda: stage.disk_worker() not in (0, pid), "another disk worker")


def kill_daemon(stage: Stage, rng: random.Random) -> float:
    pid = stage.kvd.daemon_pid()
    os.kill(pid, signal.SIGKILL)
    return stage.recovered_after(
        lambda: stage.status().pid != pid and stage.lease_round_trip(), "a lease of the next daemon"
    )


def kill_daemon_at_its_journal(stage: Stage, rng: random.Random) -> float:
    """Just before a record is written, in the middle of it, or when it is written and nobody knows."""
    pid, trigger = stage.kvd.daemon_pid(), stage.folder / rng.choice(POINTS)
    trigger.touch()
    stage.recovered_after(lambda: not trigger.exists(), "a record of the journal")
    return stage.recovered_after(
        lambda: stage.status().pid != pid and stage.lease_round_trip(), "a lease of the next daemon"
    )


def stop_daemon(stage: Stage, rng: random.Random) -> float:
    """A half-open connection: everybody waits, within deadlines."""
    _freeze(stage.kvd.daemon_pid(), rng.uniform(0.2, 1.5))
    return stage.recovered_after(stage.lease_round_trip, "a lease of a daemon that goes on")


def delete_sockets(stage: Stage, rng: random.Random) -> float:
    for name in rng.sample(["grpc.sock", "attach.sock"], rng.randint(1, 2)):
        (stage.kvd.run_dir / "host0" / name).unlink(missing_ok=True)
    return stage.recovered_after(stage.lease_round_trip, "sockets that were deleted")


def fill_run_dir(stage: Stage, rng: random.Random) -> float:
    """The file system of the run dir has no byte left for a while."""
    ballast = stage.kvd.run_dir.parent / "ballast"
    with ballast.open("wb") as file:
        _write_until_full(file.fileno())
    time.sleep(FULL_DISK_S)
    ballast.unlink()
    return stage.recovered_after(stage.lease_round_trip, "a lease after the disk was full")


def jump_clock(stage: Stage, rng: random.Random) -> float:
    """The wall clock is wrong by years; nothing that matters may look at it."""
    unfinished = stage.folder / "clock.new"
    unfinished.write_text(str(rng.uniform(-MAX_JUMP_S, MAX_JUMP_S)))
    unfinished.rename(stage.folder / CLOCK_FILE)
    return stage.recovered_after(stage.lease_round_trip, "a lease after the clock jumped")


FAULTS: dict[Fault, int] = {
    kill_worker: 4,
    stop_worker: 3,
    stop_worker_beyond_ttl: 1,
    kill_kernel_worker: 3,
    stop_kernel_worker: 1,
    kill_disk_worker: 2,
    kill_daemon: 4,
    kill_daemon_at_its_journal: 4,
    stop_daemon: 2,
    delete_sockets: 2,
    fill_run_dir: 1,
    jump_clock: 1,
}
"""How often each, relative to the others."""


def _any_worker(stage: Stage, rng: random.Random) -> RunningWorker:
    return rng.choice(stage.workers)


def _freeze(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def _kill_and_await_kernel(stage: Stage, number: signal.Signals) -> float:
    stage.recovered_after(lambda: stage.status().health == "serving", "a kernel worker at work")
    pid = stage.status().kernel_pid
    os.kill(pid, number)
    return stage.recovered_after(
        lambda: stage.status().kernel_pid not in (0, pid) and stage.status().health == "serving",
        "another kernel worker",
    )


def _write_until_full(fd: int) -> None:
    for size in (1 << 20, 1 << 12, 1):
        chunk = bytes(size)
        try:
            while os.write(fd, chunk):
                pass
        except OSError:
            continue


def mounted_tmpfs(folder: Path, megabytes: int) -> bool:
    """Whether `folder` is a file system of its own now, so that it can be filled without harm to others."""
    command = f"mount -t tmpfs -o size={megabytes}m,mode=0700 kvd-chaos {folder} 2>/dev/null"
    return os.system(command) == 0
