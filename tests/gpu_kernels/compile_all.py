"""Compiles every specialisation of every kernel, assembles each for every architecture, checks budgets.

    python -m tests.gpu_kernels.compile_all [FAMILY ...]     families: small keydiff rotate scalar tensor

About five minutes on two cores, less where the cache has the PTX. Needs no GPU.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from kvd_cuda.gpu.compile import ARCHITECTURES
from kvd_cuda.gpu.kernel import Kernel

from .assembler import Resources, assembled, ptx_of
from .catalogue import check_budget, keydiffs, rotations, scalar_scores, small_kernels, tensor_scores

FAMILIES = {
    "small": small_kernels,
    "keydiff": keydiffs,
    "rotate": rotations,
    "scalar": scalar_scores,
    "tensor": tensor_scores,
}
ASSEMBLERS = 2  # at once


def main(names: list[str]) -> int:
    """0 if all compile within their budgets; prints the largest takers and every failure."""
    failures, taken, code, texts = [], [], [], 0
    with ThreadPoolExecutor(ASSEMBLERS) as pool:
        for kernel in (kernel for name in names or FAMILIES for kernel in FAMILIES[name]()):
            ptx = ptx_of(kernel)
            texts += len(ptx.text)
            for resources in pool.map(lambda a, p=ptx: assembled(p, a), ARCHITECTURES):
                code.append((resources.code_bytes, resources.seconds))
                taken.append((resources.registers, resources.shared_bytes, kernel.name))
                failures += _problems(kernel, resources)
    for registers, shared_bytes, name in sorted(set(taken), reverse=True)[:10]:
        print(f"{registers:4} registers {shared_bytes:6} shared bytes  {name}")
    count = len({name for *_, name in taken})
    print(f"{count} kernels on {len(ARCHITECTURES)} architectures, {len(failures)} over budget")
    sizes, seconds = zip(*code, strict=True)
    print(
        f"{texts / 1e6:.1f} MB of PTX, {sum(sizes) / 1e6:.1f} MB of machine code; ptxas {sum(seconds):.0f} s"
    )
    for failure in sorted(set(failures)):
        print(failure)
    return 1 if failures else 0


def _problems(kernel: Kernel, resources: Resources) -> list[str]:
    try:
        check_budget(kernel, resources)
    except AssertionError as problem:
        return [str(problem)]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
