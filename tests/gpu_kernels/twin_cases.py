"""Compressions on a GPU and on the host, of the same lease: `python -m tests.gpu_kernels.twin_cases`.

Prints a JSON object: for each case its `Outcome`, or the message of the KernelInputError that both gave.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from tests.gpu_kernels.assembler import PTX_CACHE
from tests.gpu_kernels.on_gpu import Twins, the_device, twins
from tests.kernels.leases import Shape, make_queries, query_values

from kvd_cuda import reference
from kvd_cuda.backend import Backend
from kvd_cuda.compress import CompressPlan, CompressResult, compress
from kvd_cuda.errors import KernelInputError
from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.placing import DeviceSidecar, place
from kvd_cuda.host import HostBackend
from kvd_cuda.plan import Rope
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries

BF16 = Shape(head_dim_k=64, head_dim_v=48, group=2, length=103, dtype="bfloat16")
FP32 = Shape(head_dim_k=20, head_dim_v=8, kv_heads=3, length=90, dtype="float32", layout="layer-outermost")
FP8 = Shape(head_dim_k=80, head_dim_v=64, length=90, block_size=8, dtype="float8_e4m3fn")
FP16 = Shape(head_dim_k=96, head_dim_v=32, group=4, length=77, dtype="float16", layout="layer-outermost")
SNAPKV = CompressPlan(method="snapkv", target_tokens=48, window=8)
SPAN = CompressPlan(method="span", target_tokens=48, window=8, sinks=4, kernel=9, pooling="max", reduce="max")
H2O = CompressPlan(method="h2o", target_tokens=48, window=12, sinks=4)
ROPE = Rope(0.3 ** np.arange(8.0))
PLANS = {
    "snapkv": (BF16, SNAPKV),
    "snapkv of fp8": (FP8, SNAPKV),
    "dual": (FP32, replace(SNAPKV, sinks=4)),
    "span by token": (FP16, SPAN),
    "span by block": (BF16, replace(SPAN, method="span_block")),
    "h2o": (FP32, H2O),
    "keydiff": (FP16, CompressPlan(method="keydiff", target_tokens=48, window=12, sinks=4)),
    "streaming": (FP8, CompressPlan(method="streaming", target_tokens=48, sinks=4)),
    "streaming with rope": (
        FP16,
        CompressPlan(method="streaming", target_tokens=48, sinks=4, rope=ROPE),
    ),
}
PARTED = ("dual", "span by block", "h2o", "keydiff")
"""Those that are done with so little scratch memory, too, that one column comes after the other."""


@dataclass(frozen=True)
class Outcome:
    """How the two compare, the GPU's first: `same` are bytes and positions, errors are absolute."""

    same: bool
    kept: tuple[int, int]
    blocks: tuple[list[int] | None, list[int] | None]
    mass_error: float
    score_error: float


def compare(device: KernelDevice, shape: Shape, plan: CompressPlan, lse: bool = False) -> Outcome:
    pair = twins(device, shape, 1, compressed_length=20, observed_length=30)
    queries = make_queries(np.random.default_rng(2), shape, 20 if plan.method == "h2o" else 8)
    if lse:
        queries = with_lse(pair, queries)
    mine = run(pair.backend, pair.planes, plan, pair.queries(queries))
    theirs = run(HostBackend(), pair.host.planes, plan, queries)
    outcome = Outcome(
        pair.same(),
        (mine.kept_length, theirs.kept_length),
        (listed(mine), listed(theirs)),
        mass_error(mine, theirs),
        float(np.abs(pair.planes.scores - pair.host.planes.scores).max(initial=0, where=seen(pair))),
    )
    pair.close()
    return outcome


def run(backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> CompressResult:
    if plan.method != "h2o":
        return compress(backend, planes, plan, queries)
    backend.observe(planes, queries)
    return compress(backend, replace(planes, observed_length=planes.length), plan)


def seen(pair: Twins) -> np.ndarray:
    finite: np.ndarray = np.isfinite(pair.host.planes.scores)
    return finite


def with_lse(pair: Twins, queries: WindowQueries, error: float = 0.0) -> WindowQueries:
    layers = enumerate(pair.host.keys)
    rows = [reference.row_lse(query_values(queries, layer), keys) for layer, keys in layers]
    return replace(queries, row_lse=(np.stack(rows) + error).astype(np.float32))


def listed(result: CompressResult) -> list[int] | None:
    blocks = result.kept_block_indices
    return None if blocks is None else blocks.tolist()


def mass_error(mine: CompressResult, theirs: CompressResult) -> float:
    if mine.mass_retained is None or theirs.mass_retained is None:
        return 0.0 if mine.mass_retained is theirs.mass_retained else 1.0
    return float(np.abs(mine.mass_retained - theirs.mass_retained).max())


def refusal(
    device: KernelDevice, spoil: Callable[[Twins, WindowQueries], WindowQueries], plan: CompressPlan = SNAPKV
) -> str:
    """What the GPU says to a lease, or queries, that `spoil` made unusable."""
    pair = twins(device, FP32, 1)
    queries = spoil(pair, make_queries(np.random.default_rng(2), FP32, 8))
    try:
        run(pair.backend, pair.planes, plan, pair.queries(queries))
    except KernelInputError as error:
        return str(error)
    finally:
        pair.close()
    return "nothing"


def large_blocks(device: KernelDevice) -> str:
    """What is said to blocks that lie 2 GiB apart; nothing of them is touched."""
    plane = as_strided(np.zeros(1, np.float32), (2, 1, 1, 1), (2**31, 4, 4, 4))
    sidecar = np.zeros((2, 1, 1, 1), np.int32)
    planes = KVPlanes(
        k=[plane],
        v=[plane],
        dtype="float32",
        block_table=np.zeros(1, np.int32),
        length=1,
        position=1,
        positions=sidecar,
        scores=sidecar.view(np.float32),
    )
    try:
        place(device, planes, DeviceSidecar(0, 0))
    except KernelInputError as error:
        return str(error)
    return "nothing"


def nan_key(pair: Twins, queries: WindowQueries) -> WindowQueries:
    table, plane = pair.host.planes.block_table, pair.host.planes.k[1]
    plane[table[2], 3, 1] = np.nan
    start, size = pair.first_host_address, pair.memory.byte_count
    pair.memory.write(0, start, size)
    return queries


def nan_query(pair: Twins, queries: WindowQueries) -> WindowQueries:
    queries.values[0, 3, 1] = np.nan
    return queries


def main() -> None:
    device = the_device(PTX_CACHE)
    found: dict[str, Any] = {}
    for name, (shape, plan) in PLANS.items():
        free = twins(device, shape, 1)
        goal = free.host.free[: -(-plan.target_tokens // shape.block_size)]
        free.close()
        found[name] = asdict(compare(device, shape, plan))
        if plan.method != "span_block":
            found[f"{name}, out of place"] = asdict(
                compare(device, shape, replace(plan, destination_table=goal))
            )
    found["with log-sum-exps"] = asdict(compare(device, BF16, SNAPKV, lse=True))
    small = the_device(PTX_CACHE, 24 << 10)
    for name in PARTED:
        found[f"{name}, in parts"] = asdict(compare(small, *PLANS[name]))
    found["a key that is NaN"] = refusal(device, nan_key)
    found["a key that is NaN, to keydiff"] = refusal(device, nan_key, PLANS["keydiff"][1])
    found["a query that is NaN"] = refusal(device, nan_query)
    found["a wrong log-sum-exp"] = refusal(device, lambda pair, queries: with_lse(pair, queries, 0.2))
    found["blocks of 2 GiB"] = large_blocks(device)
    found["no room"] = refusal(the_device(PTX_CACHE, 8 << 10), lambda _, queries: queries)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
