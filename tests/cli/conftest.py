"""A real kvd of two host devices, and a worker that holds two leases on the first."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.running_kvd import eventually, running_kvd

import kvd_client
from kvd_client.cli import main

SPEC = kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_size=16)
BLOCKS = 64


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the kvd of all tests here serves; both devices serve already."""
    with running_kvd(tmp_path_factory.mktemp("kvd"), "--host-memory", "16MiB", "--devices", "2") as kvd:
        command = ["--run-dir", str(kvd.run_dir), "-o", "json", "status"]
        eventually(lambda: main(command) == 0, "both devices to serve")
        yield kvd.run_dir


@dataclass(frozen=True)
class Answer:
    """What a kvctl call said."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Kvctl = Callable[..., Answer]


@pytest.fixture
def kvctl(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """kvctl("pool", "list", ...) of that kvd."""

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        status = main(["--run-dir", str(run_dir), *map(str, arguments)])
        return Answer(status, *capsys.readouterr())

    return call


@dataclass(frozen=True)
class Worker:
    """A worker on host0 and what it holds there."""

    client: kvd_client.Client
    dense: kvd_client.Lease
    streaming: kvd_client.Lease
    pid: int


@pytest.fixture
def worker(run_dir: Path, kvctl: Kvctl) -> Iterator[Worker]:
    """Pool `chat` with a dense lease of 100 tokens and a streaming one. All is gone afterwards."""
    with kvd_client.connect(run_dir, device="host0", name="decode-1") as client:
        pool = client.pool("chat", SPEC, blocks=BLOCKS)
        dense = pool.lease(tokens=100)
        dense.extend(100)
        dense.commit(100)
        streaming = pool.lease(tokens=40, policy=kvd_client.Streaming(sinks=4, window=60))
        yield Worker(client, dense, streaming, os.getpid())
    assert kvctl("pool", "drop", "chat").status == 0
