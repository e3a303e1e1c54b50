"""Fixtures for every folder: real daemons."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from .running_kvd import RunningKvd, running_kvd

settings.register_profile("untimed", deadline=None)  # a loaded machine is no bug
settings.load_profile("untimed")

for name in ("COLUMNS", "LINES"):  # of whose terminal the tests run in must not matter
    os.environ.pop(name, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU runs only where it is asked for: `make test-gpu`."""
    if "gpu" in config.option.markexpr:
        return
    wanted = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[RunningKvd]:
    """A kvd of this test's own, with 256 MiB of host memory; stopped, and checked to leave nothing."""
    with running_kvd(tmp_path) as running:
        yield running


@pytest.fixture
def start_kvd(tmp_path: Path) -> Iterator[Callable[..., RunningKvd]]:
    """start_kvd("--session-ttl", "300ms", ...): a kvd of this test's own with options."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(running_kvd(tmp_path, *arguments))


@pytest.fixture(scope="module")
def shared_kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKvd]:
    """One kvd for all tests of a module that leave it as they found it."""
    with running_kvd(tmp_path_factory.mktemp("kvd")) as running:
        yield running
