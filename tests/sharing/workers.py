"""Worker processes on a machine, and the kinds of machines there are."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.client.daemon import Daemon
from tests.fakecuda import FakeGpus, fake_gpus
from tests.running_kvd import PATIENCE_S, RunningKvd, command_of, eventually, running_kvd

import kvd_client

GPU_KINDS = ("cuda", "cuda_legacy")
KINDS = ("host", *GPU_KINDS)
MEMORY = 64 << 20  # bytes of a device that kvd may use
FAKE_MEMORY = 1 << 30  # bytes of a stand-in: pools of all tests stay, two MiB each at least
TIER = ("--host-tier", "2MiB")
REAL_KINDS = {"gpu": (), "gpu_legacy": ("--gpu-sharing", "legacy")}
OWNER = "kvd_daemon.device.legacy_owner"
KERNEL_WORKER = "kvd_daemon.kernel.worker"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # of torch, not of ours: kvd has it, workers have it or not
STAND_INS = Path(__file__).with_name("stand_ins")


class Worker:
    """A process of its own. Methods are those of `worker.Desk`; an error there is raised here."""

    def __init__(self, run_dir: Path, device: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(run_dir), device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda **arguments: self.ask(method, arguments)

    def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the worker has died"
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(kvd_client, answer["error"])(answer["message"])
        return answer["result"]

    def death(self, method: str, **arguments: Any) -> int:
        """The signal that this ends the worker with."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return -self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


@dataclass
class Site:
    """A kvd with one kind of memory, and workers that come and go."""

    kind: str
    kvd: RunningKvd
    device: str
    gpus: FakeGpus = field(default_factory=lambda: FakeGpus(Path()))
    workers: list[Worker] = field(default_factory=list)

    def worker(self, **environment: str) -> Worker:
        """One more, with these words in its environment."""
        own = self.gpus.full_environment()
        if self.kind in GPU_KINDS:
            own["PYTHONPATH"] = f"{STAND_INS}:{own.get('PYTHONPATH', '')}"
        worker = Worker(self.kvd.run_dir, self.device, own | environment)
        self.workers.append(worker)
        return worker

    def clear(self) -> None:
        """No worker is left."""
        while self.workers:
            self.workers.pop().kill()

    def drop_pools(self) -> None:
        """And the owners of their memory end, if they have some."""
        daemon = Daemon(self.kvd, self.device)
        eventually(lambda: not daemon.session_names(), "the end of all sessions")
        for pool in daemon.status().pools:
            daemon.drop_pool(pool.pool.name)
        eventually(lambda: not self.owners(), "the end of the memory's owners")

    def owners(self) -> list[int]:
        """Processes that keep memory of the old kind."""
        return self._processes(OWNER)

    def kernel_pid(self) -> int:
        """The kernel worker, as soon as there is one."""
        eventually(lambda: self._processes(KERNEL_WORKER), "a kernel worker")
        return self._processes(KERNEL_WORKER)[0]

    def _processes(self, module: str) -> list[int]:
        processes = psutil.Process(self.kvd.process.pid).children(recursive=True)
        return [p.pid for p in processes if module in command_of(p)]


@contextlib.contextmanager
def site(kind: str, folder: Path) -> Iterator[Site]:
    """64 MiB of the first of two fake GPUs, which have more; or as much of the host, or of a real GPU."""
    size = str(MEMORY)
    if kind == "host":
        with running_kvd(folder, "--host-memory", size, *TIER) as kvd:
            yield from _cleared(Site(kind, kvd, "host0"))
        return
    if kind in REAL_KINDS:
        with running_kvd(folder, "--gpus", "0", "--memory", size, *TIER, *REAL_KINDS[kind]) as kvd:
            yield from _cleared(Site(kind, kvd, "gpu0"))
        return
    old = {"no_vmm": 3} if kind == "cuda_legacy" else {}
    with fake_gpus(devices=2, memory=FAKE_MEMORY, **old) as gpus:
        arguments = ("--gpus", "0", "--memory", size, *TIER)
        environment = gpus.full_environment({ALLOCATOR: "expandable_segments:True"})
        with running_kvd(folder, *arguments, environment=environment) as kvd:
            yield from _cleared(Site(kind, kvd, "gpu0", gpus))


def _cleared(made: Site) -> Iterator[Site]:
    try:
        yield made
    finally:
        made.clear()
        made.drop_pools()
