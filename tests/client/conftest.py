"""A daemon, a client, and pools that leave nothing behind."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from tests.running_kvd import PATIENCE_S, RunningKvd

import kvd_client

from .daemon import Daemon

NewPool = Callable[..., kvd_client.Pool]
_numbers = itertools.count()


@pytest.fixture
def daemon(shared_kvd: RunningKvd) -> Daemon:
    """For tests that leave it alive."""
    return Daemon(shared_kvd)


@pytest.fixture
def own_daemon(kvd: RunningKvd) -> Daemon:
    """For tests that do not."""
    return Daemon(kvd)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.run_dir, name="test", timeout=PATIENCE_S) as connected:
        yield connected


@pytest.fixture
def new_pool(daemon: Daemon, client: kvd_client.Client) -> Iterator[NewPool]:
    """new_pool(spec, blocks) -> a pool of its own name, dropped afterwards."""
    names = []

    def create(spec: kvd_client.KVSpec, blocks: int = 64) -> kvd_client.Pool:
        names.append(f"pool-{next(_numbers)}")
        return client.pool(names[-1], spec, blocks)

    yield create
    client.close()
    for name in names:
        daemon.drop_pool(name)


@pytest.fixture
def any_order_pool(new_pool: NewPool, spec: kvd_client.KVSpec) -> kvd_client.Pool:
    """One for all examples of a property."""
    return new_pool(spec, 256)


@pytest.fixture
def spec() -> kvd_client.KVSpec:
    """Small, float32: exact, and quick to score."""
    return kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=16, dtype="float32", block_size=16)
