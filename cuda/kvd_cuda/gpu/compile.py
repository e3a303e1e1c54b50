"""Kernel -> PTX, without a driver or a device, and kept on disk.

One PTX serves all devices: that of the oldest architecture we run on. Nothing newer would be used (fp8 is
widened by integer arithmetic), what differs between devices is the assembler's work, and Numba's own, 0.3 to
3 s a kernel and nine tenths of the whole, is then done once. Kernels are specialised by dtype, head_dim and
number of rows, so they are compiled when first asked for; from disk a kernel takes milliseconds.
"""

import hashlib
import os
import re
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

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")


@dataclass(frozen=True)
class Ptx:
    """Text with one entry called `name`."""

    name: str
    text: str


def compiled(kernel: Kernel, folder: Path) -> Ptx:
    """PTX of `kernel`, from `folder` if it was compiled there before from the same sources and compiler."""
    path = folder / f"{kernel.name}-{_fingerprint()}.ptx"
    if path.exists():
        return Ptx(kernel.name, path.read_text())
    ptx = compile_ptx(kernel)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(ptx.text)
    partial.replace(path)
    return ptx


def compile_ptx(kernel: Kernel) -> Ptx:
    """PTX of `kernel`. Its blocks may have `threads` at most, and one of them must fit a multiprocessor.

    Without that one the assembler aims at two and spills.
    """
    bounds = (kernel.threads, 1)
    text, _ = cuda.compile_ptx(
        kernel.function, types.void(*kernel.parameters), cc=OLDEST, launch_bounds=bounds
    )
    (mangled,) = _ENTRY.findall(text)
    return Ptx(kernel.name, text.replace(mangled, kernel.name))


@cache
def _fingerprint() -> str:
    """Of all that PTX is made from."""
    digest = hashlib.sha256("".join(version(name) for name in ("numba", "numba-cuda")).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def image_of(kernel: Kernel, folder: Path, capability: tuple[int, int]) -> bytes:
    """What a driver loads for `kernel` on a GPU of that compute capability."""
    return compiled(kernel, folder).text.encode()
