"""kvds with rules, in folders that another user may enter."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.running_kvd import RunningKvd, running_kvd

from .peers import OTHER_GID

Ruled = Callable[..., RunningKvd]


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """pytest's own folders are closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-access-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ruled_kvd(open_folder: Path) -> Iterator[Ruled]:
    """ruled_kvd(toml, *arguments): a kvd of this test's own that the group of `peers` may reach."""
    with contextlib.ExitStack() as stack:

        def start(toml: str, *arguments: str) -> RunningKvd:
            folder = Path(tempfile.mkdtemp(dir=open_folder))
            folder.chmod(0o711)
            return stack.enter_context(ruled(folder, toml, *arguments))

        yield start


@contextlib.contextmanager
def ruled(folder: Path, toml: str, *arguments: str) -> Iterator[RunningKvd]:
    config = folder / "kvd.toml"
    config.write_text(toml)
    shared = ("--host-memory", "64MiB", "--config", str(config), "--socket-group", str(OTHER_GID))
    with running_kvd(folder, *shared, *arguments) as kvd:
        yield kvd
