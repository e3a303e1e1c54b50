"""A pool for the tiny model in a real daemon, and the model with and without kvd."""

import pytest

import kvd_client
from kvd_client.hf import attach

from .tiny import POOL_BLOCKS, pool_spec, tiny_model

TIMEOUT_S = 120  # of a call; a busy machine takes its time to start the kernel worker


@pytest.fixture
def client(shared_kvd):
    with kvd_client.connect(shared_kvd.run_dir, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture
def make_pool(client):
    """A pool with the tiny model's geometry: make_pool(layout=, dtype=)."""

    def make(**geometry):
        name = "-".join(("tiny", *geometry.values()))
        return client.pool(name, pool_spec(**geometry), POOL_BLOCKS)

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
    attach(model)
    return model
