"""A kvd whose daemon can be told to die at a point of its journal."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from tests.client.daemon import Daemon
from tests.running_kvd import RunningKvd, eventually, running_kvd

INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class ArmedKvd:
    kvd: RunningKvd
    folder: Path

    @contextlib.contextmanager
    def dying_at(self, point: str) -> Iterator[None]:
        """What is done meanwhile leads there."""
        pid = self.kvd.daemon_pid()
        (self.folder / point).touch()
        yield
        eventually(lambda: not (self.folder / point).exists(), f"a daemon that comes to {point}")
        eventually(lambda: self._serving_pid() not in (0, pid), "the next daemon")

    def _serving_pid(self) -> int:
        try:
            return Daemon(self.kvd).status().pid
        except grpc.RpcError:
            return 0


@contextlib.contextmanager
def armed_kvd(folder: Path, *arguments: str) -> Iterator[ArmedKvd]:
    paths = os.pathsep.join(path for path in (str(INJECT), os.environ.get("PYTHONPATH", "")) if path)
    environment = os.environ | {"KVD_CHAOS_DIR": str(folder), "PYTHONPATH": paths}
    with running_kvd(folder, *arguments, environment=environment) as kvd:
        yield ArmedKvd(kvd, folder)
