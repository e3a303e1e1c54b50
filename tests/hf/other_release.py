"""A virtual environment like this one, but with the other end of the transformers releases kvd works with."""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import transformers

OLDEST, NEWEST = "5.2.0", "5.24.0"
OTHER = OLDEST if transformers.__version__.startswith("5.24.") else NEWEST
INSTALL_TIMEOUT_S = 600  # seconds; 12 MB are downloaded
REPOSITORY = Path(__file__).resolve().parents[2]


def python_with_other_release() -> Path:
    """The environment's interpreter; it is made the first time, in under a minute.

    Everything but transformers (and what it needs newer) is seen through, by a line in a .pth file.
    """
    cache = Path(os.environ.get("KVD_CACHE") or REPOSITORY / ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"transformers-{OTHER}-beside-{transformers.__version__}"
    python = folder / "bin" / "python"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, python)
            (folder / ".ready").touch()
    return python


def _make(folder: Path, python: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    site_packages = next(folder.glob("lib/python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (site_packages / "see_through.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    _run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"transformers=={OTHER}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
