"""Kernel -> PTX, without a driver or a device, and kept on disk.

One PTX serves all devices: that of the oldest architecture we run on. Nothing newer would be used (fp8 is
widened by integer arithmetic). The driver makes machine code of it, which takes 0.1 s a kernel and which it
keeps in a cache of its own; Numba's part takes 0.2 to 4 s a kernel, so its PTX is kept here. Kernels are
specialised by dtype, head_dim and number of rows: a pool needs some twenty of the hundreds there are.
"""

import contextlib
import hashlib
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.kernel import Kernel

OLDEST = (8, 0)  # A100; has cp.async and mma for bf16
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What every kernel is assembled for in the tests."""

PTX_VERSION = "8.0"
"""What drivers of CUDA 12.0 read. The compiler writes a newer one, but uses nothing that came since."""

_VERSION = re.compile(r"^\.version .*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")


@dataclass(frozen=True)
class Ptx:
    """Text with one entry called `name`."""

    name: str
    text: str


def compiled(kernel: Kernel, folder: Path) -> Ptx:
    """PTX of `kernel`, from `folder` if it was compiled there before from the same sources and compiler.

    Processes may do this at the same time. A file that is damaged, or cannot be written, does not matter.
    """
    path = folder / f"{kernel.name}-{_fingerprint()}.ptx"
    kept = _kept(path)
    if kept is not None:
        return Ptx(kernel.name, kept)
    ptx = compile_ptx(kernel)
    with contextlib.suppress(OSError):
        _keep(path, ptx.text)
    return ptx


def _kept(path: Path) -> str | None:
    """Behind a line with its SHA-256; None if it is not there or not whole."""
    try:
        digest, _, text = path.read_text().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == _digest_line(text) else None


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
        partial.write(f"{_digest_line(text)}\n{text}")
    Path(partial.name).replace(path)


def _digest_line(text: str) -> str:
    return f"// sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def compile_ptx(kernel: Kernel) -> Ptx:
    """PTX of `kernel`. Its blocks may have `threads` at most, and one of them must fit a multiprocessor.

    Without that one the assembler aims at two and spills.
    """
    bounds = (kernel.threads, 1)
    text, _ = cuda.compile_ptx(
        kernel.function, types.void(*kernel.parameters), cc=OLDEST, launch_bounds=bounds
    )
    (mangled,) = _ENTRY.findall(text)
    named = text.replace(mangled, kernel.name)
    return Ptx(kernel.name, _VERSION.sub(f".version {PTX_VERSION}", named, count=1))


@cache
def _fingerprint() -> str:
    """Of all that PTX is made from."""
    digest = hashlib.sha256("".join(version(name) for name in ("numba", "numba-cuda")).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
