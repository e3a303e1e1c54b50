"""A kvd of each kind of memory, made when it is first needed, for tests that leave it as they found it."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from .workers import GPU_KINDS, KINDS, REAL_KINDS, Site, site


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Site]]:
    with contextlib.ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(site(kind, tmp_path_factory.mktemp(kind))))


EVERYWHERE = [*KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in REAL_KINDS)]


@pytest.fixture(params=EVERYWHERE)
def here(request: pytest.FixtureRequest, sites: Callable[[str], Site]) -> Iterator[Site]:
    """On every kind; on a real GPU only if asked for.

    No worker of an earlier test is there, and none of this one stays; pools stay.
    """
    yield sites(request.param)
    sites(request.param).clear()


@pytest.fixture(params=GPU_KINDS)
def on_gpu(request: pytest.FixtureRequest, sites: Callable[[str], Site]) -> Iterator[Site]:
    """As `here`, on GPUs."""
    yield sites(request.param)
    sites(request.param).clear()
