"""Builds the fake libcuda.so.1 on first use, and lays out machines whose processes find it."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("fakecuda.c")
ROOT = Path(__file__).resolve().parents[2]
HOOK = "tests.fakecuda.ptx_hook"
CACHE = Path(os.environ.get("KVD_CACHE") or ROOT / ".cache")
HEADERS = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cuda_runtime" / "include"
FLAGS = ("-shared", "-fPIC", "-O2", "-pthread", "-Wl,-soname,libcuda.so.1")
TMPFS = "/dev/shm"


def library_folder() -> Path:
    """Where libcuda.so.1 is; one for each state of its source."""
    sources = b"".join(part.read_bytes() for part in sorted(SOURCE.parent.glob("*.c")))
    name = hashlib.sha256(sources).hexdigest()[:16]
    folder = CACHE / "fakecuda" / name
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "libcuda.so.1"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            part = folder / f"part-{os.getpid()}"
            command = ["cc", *FLAGS, "-I", str(HEADERS), "-o", str(part), str(SOURCE), "-ldl"]
            subprocess.run(command, check=True, capture_output=True)
            part.replace(built)
    return folder


@dataclass
class FakeGpus:
    """`environment` is what a process needs to be on this machine; see fakecuda.c for its words."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, **words: object) -> "FakeGpus":
        told = {f"FAKECUDA_{name.upper()}": str(value) for name, value in words.items()}
        ours = {"LD_LIBRARY_PATH": str(library_folder()), "FAKECUDA_DIR": str(folder), "FAKECUDA_HOOK": HOOK}
        return cls(folder, ours | told)

    def run(self, script: str, *arguments: str, **more: str) -> str:
        """What a Python process on it prints; it has to end well."""
        command = [sys.executable, "-c", script, *arguments]
        ran = subprocess.run(command, env=self.full_environment(more), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def full_environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        paths = f"{ROOT}:{mine.get('PYTHONPATH', '')}"  # the hook is among the tests
        return mine | {"PYTHONPATH": paths} | self.environment | dict(more or {})

    def context_pids(self) -> set[int]:
        """Processes that have (or had) a CUDA context."""
        return {int(path.name.split("-")[2]) for path in self.folder.glob("context-*")}

    def synchronized(self, pid: int, stream: int = 0) -> bool:
        """Whether that process has waited for a stream; 1 is that of copies that wait by themselves."""
        return (self.folder / f"synchronized-{pid}-{stream}").exists()

    def lose(self, device: int) -> None:
        """For processes that start from now on, until `find`."""
        (self.folder / f"lost-{device}").touch()

    def find(self, device: int) -> None:
        (self.folder / f"lost-{device}").unlink()

    def kill_in_kernel(self, pid: int, name: str) -> None:
        """The process dies in the middle of its next kernel whose name begins so; some bytes are written."""
        (self.folder / f"die-{pid}").write_text(name)

    def kill_in_copy(self, pid: int, copies: int) -> None:
        """The process dies in the middle of the copy that is so many from now; half of it is done."""
        (self.folder / f"die-copying-{pid}").write_text(str(copies))

    def rdma_capable(self) -> list[bool]:
        """Of all memory there is."""
        return [bool(path.stat().st_mode & 0o040) for path in self.folder.glob("memory-*")]


@contextlib.contextmanager
def fake_gpus(**words: object) -> Iterator[FakeGpus]:
    """A machine of its own: fake_gpus(devices=2, memory=64 << 20)."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-fake-gpus-", dir=TMPFS))
    try:
        yield FakeGpus.of(folder, **words)
    finally:
        shutil.rmtree(folder)
