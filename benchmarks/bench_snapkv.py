"""SnapKV of one layer on one CPU thread: ours against the formulation the paper publishes, in CPU seconds.

    python benchmarks/bench_snapkv.py [--sizes 4096 16384 32768 131072] [--json PATH]

Both get the same tensors in the same run, in turns, one thread. "Published" is listing 1 of the SnapKV paper
with its code's defaults: keys and values repeated to all query heads, matmul, fp32 softmax over all keys, sum
over the window, avg_pool1d of 5, topk and gather per query head, concat of the window. Ours scores, selects
and moves K, V and positions from blocks of random order into free blocks. CPU seconds are the smallest of the
rounds, wall seconds those of the same round. malloc keeps freed pages for both: page faults of fresh
temporaries, which would hurt the published form most, are left out. Workspace is the growth of the peak
resident set (VmHWM) over one compression in a process of its own, destination blocks touched before; it
includes the result's kept indices.
"""

import argparse
import ctypes
import datetime
import gc
import json
import math
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numba
import numpy as np
import torch

from kvd_cuda.compress import CompressPlan, compress
from kvd_cuda.dtypes import Array, IntArray
from kvd_cuda.host import HostBackend
from kvd_cuda.planes import KVPlanes, gather_slots
from kvd_cuda.queries import WindowQueries

Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW, KERNEL, BLOCK_SIZE = 32, 8, 128, 32, 5, 16
DEFAULT_SIZES = (4_096, 16_384, 32_768, 131_072)  # tokens
KEEP_PERCENT = 15
ROUNDS = 3
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # glibc malloc.h


@dataclass(frozen=True)
class Timing:
    """One formulation's fastest round."""

    cpu_ms: float
    wall_ms: float


@dataclass(frozen=True)
class Row:
    """One size and dtype."""

    tokens: int
    dtype: str
    kept: int
    published: Timing
    ours: Timing
    ratio: float
    workspace_mb: float


def published(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's listing. q [q_heads, window, d], k and v [kv_heads, N, d] -> K, V [q_heads, kept, d]."""
    k, v = repeat_kv(k), repeat_kv(v)
    weights = torch.matmul(q, k.transpose(1, 2)) / math.sqrt(HEAD_DIM)
    hidden = torch.full((WINDOW, WINDOW), torch.finfo(weights.dtype).min, dtype=weights.dtype).triu(1)
    weights[:, :, -WINDOW:] += hidden
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    votes = weights[:, :, :-WINDOW].sum(dim=-2)
    pooled = torch.nn.functional.avg_pool1d(votes[None], KERNEL, stride=1, padding=KERNEL // 2)[0]
    chosen = pooled.topk(kept - WINDOW, dim=-1).indices[..., None].expand(-1, -1, HEAD_DIM)
    past_k, past_v = k[:, :-WINDOW].gather(1, chosen), v[:, :-WINDOW].gather(1, chosen)
    return torch.cat([past_k, k[:, -WINDOW:]], dim=1), torch.cat([past_v, v[:, -WINDOW:]], dim=1)


def repeat_kv(x: torch.Tensor) -> torch.Tensor:
    """[kv_heads, N, d] -> [q_heads, N, d], materialised, as the published code does before it caches."""
    group = Q_HEADS // KV_HEADS
    return x[:, None].expand(-1, group, -1, -1).reshape(Q_HEADS, -1, HEAD_DIM)


@dataclass(frozen=True)
class Case:
    """One lease with its queries and the plan to compress it by."""

    planes: KVPlanes
    queries: WindowQueries
    plan: CompressPlan


def make_case(tokens: int, dtype: str) -> Case:
    """A lease of one layer in blocks of random order, with enough free blocks for what stays."""
    kept = -(-tokens * KEEP_PERCENT // 100 // BLOCK_SIZE) * BLOCK_SIZE
    source, target = -(-tokens // BLOCK_SIZE), kept // BLOCK_SIZE
    blocks = source + target + 1
    table = np.random.default_rng(0).permutation(np.arange(1, blocks)).astype(np.int32)
    torch.manual_seed(0)
    shape = (blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k, v = stored(torch.randn(shape), dtype), stored(torch.randn(shape), dtype)
    sidecar = (blocks, 1, KV_HEADS, BLOCK_SIZE)
    planes = KVPlanes(
        k=[k],
        v=[v],
        dtype=dtype,
        block_table=table[:source],
        length=tokens,
        position=tokens,
        positions=np.ones(sidecar, np.int32),
        scores=np.ones(sidecar, np.float32),
    )
    plan = make_plan(kept, table[source:])
    queries = WindowQueries(stored(torch.randn(1, WINDOW, Q_HEADS, HEAD_DIM), dtype), dtype)
    return Case(planes, queries, plan)


def make_plan(kept: int, destination: IntArray) -> CompressPlan:
    return CompressPlan(
        method="snapkv", target_tokens=kept, window=WINDOW, kernel=KERNEL, destination_table=destination
    )


def stored(values: torch.Tensor, dtype: str) -> Array:
    """`values` in the storage of `dtype`."""
    if dtype == "bfloat16":
        return values.to(torch.bfloat16).view(torch.uint16).numpy()
    return values.numpy()


def as_torch(array: Array, dtype: str) -> torch.Tensor:
    """The same numbers as a torch tensor of `dtype`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def contiguous_tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lease as the published code holds it: q [q_heads, window, d], k and v [kv_heads, N, d]."""
    planes, dtype = case.planes, case.planes.dtype
    k, v = (gather_slots(plane[0], planes.block_table, planes.length) for plane in (planes.k, planes.v))
    rows = (case.queries.values[0], k, v)
    q, k_rows, v_rows = (as_torch(row.transpose(1, 0, 2), dtype) for row in rows)
    return q, k_rows, v_rows


def measured(action: Callable[[], object]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Timing((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3)


def compare(tokens: int, dtype: str) -> Row:
    """Both formulations in turns; the first round of each warms up and does not count."""
    case = make_case(tokens, dtype)
    q, k, v = contiguous_tensors(case)
    backend, kept = HostBackend(), case.plan.target_tokens
    actions = {
        "published": lambda: published(q, k, v, kept),
        "ours": lambda: compress(backend, case.planes, case.plan, case.queries),
    }
    rounds = [{name: measured(action) for name, action in actions.items()} for _ in range(ROUNDS + 1)][1:]
    best = {name: min((r[name] for r in rounds), key=lambda t: t.cpu_ms) for name in actions}
    ratio = best["published"].cpu_ms / best["ours"].cpu_ms
    return Row(tokens, dtype, kept, best["published"], best["ours"], ratio, workspace_mb(tokens, dtype))


def workspace_mb(tokens: int, dtype: str) -> float:
    """Peak resident growth of one compression, in a fresh process; MB of 10**6 bytes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_growth_mb, (tokens, dtype))


def peak_growth_mb(tokens: int, dtype: str) -> float:
    """Runs in the child: compile and load everything on a small lease, then measure a new backend."""
    torch.set_num_threads(1)
    small, case = make_case(1_024, dtype), make_case(tokens, dtype)
    compress(HostBackend(), small.planes, small.plan, small.queries)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or freed pages of the set-up would hide what the compression takes
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present
    before = status_bytes("VmHWM")
    compress(HostBackend(), case.planes, case.plan, case.queries)
    return (status_bytes("VmHWM") - before) / 1e6


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def machine() -> dict[str, object]:
    """Where and with what this ran."""
    info = Path("/proc/cpuinfo").read_text()
    model = next(line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name"))
    flags = next(line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags"))
    return {
        "cpu": model,
        "flags": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "threads": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def keep_freed_pages() -> None:
    """glibc gives nothing back to the system: temporaries of both sides find warm pages."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_MAX, 0) == 1
    assert libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1) == 1


def main() -> None:
    """Print the table as rows come; write JSON at the end."""
    parser = argparse.ArgumentParser(description="SnapKV on a CPU core against the published formulation")
    parser.add_argument("--sizes", type=int, nargs="+", default=DEFAULT_SIZES, help="tokens")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_pages()
    print(
        f"Hq {Q_HEADS}, Hkv {KV_HEADS}, D {HEAD_DIM}, W {WINDOW}, kernel {KERNEL}; CPU ms (wall ms), 1 thread"
    )
    print(f"{'tokens':>8} {'dtype':>9} {'published':>16} {'ours':>16} {'ratio':>6} {'workspace MB':>13}")
    rows = []
    for tokens in args.sizes:
        for dtype in ("float32", "bfloat16"):
            row = compare(tokens, dtype)
            rows.append(row)
            timings = [f"{t.cpu_ms:.0f} ({t.wall_ms:.0f})" for t in (row.published, row.ours)]
            print(
                f"{tokens:>8} {dtype:>9} {timings[0]:>16} {timings[1]:>16} {row.ratio:>6.1f} "
                f"{row.workspace_mb:>13.1f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
