"""A daemon with a host tier, and what its operator sees."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, running_kvd

import kvd_client

HOST_TIER = "8MiB"


@pytest.fixture(scope="module")
def tiered_kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKvd]:
    """One for all tests of a module that leave it as they found it."""
    with running_kvd(tmp_path_factory.mktemp("kvd"), "--host-tier", HOST_TIER) as running:
        yield running


@pytest.fixture
def daemon(tiered_kvd: RunningKvd) -> Daemon:
    return Daemon(tiered_kvd)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.run_dir, name="test", timeout=PATIENCE_S) as connected:
        yield connected


@pytest.fixture
def own_kvd(tmp_path: Path) -> Iterator[RunningKvd]:
    """For tests that kill parts of it."""
    with running_kvd(tmp_path, "--host-tier", HOST_TIER) as running:
        yield running
