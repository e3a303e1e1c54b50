"""PTX of our kernels, and what NVIDIA's assembler makes of it."""

import importlib.util
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvd_cuda.gpu.compile import Ptx, compiled
from kvd_cuda.gpu.kernel import Kernel

ROOT = Path(__file__).resolve().parents[2]
PTX_CACHE = Path(os.environ.get("KVD_CACHE", ROOT / ".cache")) / "ptx"
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes of stack and spills a thread, shared bytes a block.

    code_bytes, seconds  of the machine code, and what the assembler took for it
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int
    seconds: float


def ptx_of(kernel: Kernel) -> Ptx:
    """The kernel's PTX, from the tests' cache if nothing it is made from has changed."""
    return compiled(kernel, PTX_CACHE)


@cache
def ptxas() -> Path:
    """The assembler of the CUDA 12 wheels."""
    found = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert found is not None, "the dev extra brings nvidia-cuda-nvcc-cu12"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "bin" / "ptxas"


def assembled(ptx: Ptx, architecture: str) -> Resources:
    """What `ptx` takes on an architecture such as "sm_90"; AssertionError in ptxas's words if it refuses."""
    with tempfile.NamedTemporaryFile() as made:
        command, began = [ptxas(), "-v", f"-arch={architecture}", "-", "-o", made.name], time.perf_counter()
        done = subprocess.run(command, input=ptx.text, capture_output=True, text=True, check=False)
        seconds, code_bytes = time.perf_counter() - began, os.path.getsize(made.name)
    assert done.returncode == 0, f"{ptx.name} on {architecture}: {done.stderr}"
    used, stack, shared = (pattern.search(done.stderr) for pattern in (USED, STACK, SHARED))
    assert used is not None, done.stderr
    assert stack is not None, done.stderr
    spills = sum(map(int, stack.groups()))
    return Resources(int(used[1]), spills, int(shared[1]) if shared else 0, code_bytes, seconds)
