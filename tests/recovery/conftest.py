"""A daemon of each test's own, and the geometry of what it serves."""

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import RunningKvd

import kvd_client


@pytest.fixture
def daemon(kvd: RunningKvd) -> Daemon:
    return Daemon(kvd)


@pytest.fixture
def spec() -> kvd_client.KVSpec:
    """As the workers' SPEC."""
    return kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="float32")
