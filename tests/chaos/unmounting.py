"""A folder that may become a file system of its own, and is none any more afterwards."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    folder.mkdir()
    try:
        yield
    finally:
        if os.path.ismount(folder):
            os.system(f"umount -l {folder}")
