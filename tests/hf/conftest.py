"""A real daemon and a pool for the tiny model."""

import subprocess
import sys
import tempfile
import uuid

import pytest

import kvd_client

from .tiny import POOL_BLOCKS, pool_spec, tiny_model

KVD = "from kvd_daemon.cli import main; main()"


@pytest.fixture(scope="session")
def run_dir():
    with tempfile.TemporaryDirectory(prefix="kvd-hf-") as folder:
        command = [sys.executable, "-c", KVD, "--host-memory", "128MiB", "--run-dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            assert daemon.stdout.readline().startswith("kvd ready")
            yield folder
            daemon.terminate()


@pytest.fixture
def client(run_dir):
    with kvd_client.connect(run_dir) as client:
        yield client


@pytest.fixture
def make_pool(client):
    """A new pool with the tiny model's geometry: make_pool(layout=, dtype=)."""

    def make(**geometry):
        return client.pool(f"tiny-{uuid.uuid4().hex}", pool_spec(**geometry), POOL_BLOCKS)

    return make


@pytest.fixture
def pool(make_pool):
    return make_pool()


@pytest.fixture(scope="session")
def plain():
    """The tiny model as transformers made it."""
    return tiny_model()


@pytest.fixture(scope="session")
def attached():
    """The same model, attached to kvd."""
    model = tiny_model()
    kvd_client.hf.attach(model)
    return model
