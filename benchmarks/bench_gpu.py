"""A GPU at work: sharing a large pool, SnapKV as a fraction of what the card can do, compaction.

    python benchmarks/bench_gpu.py [--json PATH] [--rounds N] [--check]

SnapKV of one layer, 8 kv heads of 128 elements, 16-token blocks in random order, queries in bfloat16. The
roofline is that of this run: two passes over the keys at the bandwidth of a device-to-device copy, or their
matmuls at the rate of torch's bf16 matmul, whichever takes longer (without a torch for CUDA, the first).
"score" are the scoring kernels, "choose" all up to the kept slots in host memory. The same choice by torch,
with the group folded into one matmul and with repeated keys, and by kvpress if it is installed, is made from
contiguous bfloat16 keys. Compaction counts bytes read plus written, as the copy does.

Without a GPU nothing is measured. --check runs everything once on tiny shapes and prints no figures.
"""

import argparse
import datetime
import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from gpu_bench.card import copy_gb_per_s, device_of, first_gpu, matmul_tflops
from gpu_bench.lease import Case
from gpu_bench.peers import grouped, materialised, peer_ms, tensors
from gpu_bench.sharing import sharing_s
from gpu_bench.snapkv import Ceiling, Timing, kept_tokens, measured

from kvd_cuda.driver import Gpu

TOKENS, QUERY_HEADS, WINDOWS = (8_192, 32_768, 131_072), (32, 64), (32, 64)
DTYPES = ("bfloat16", "float8_e4m3fn")
POOL_BYTES = 64 << 30  # of what is shared, or what fits
POOL_SHARE = 0.8  # of the free memory, at most
COPY_BYTES, MATMUL_SIZE = 1 << 30, 8_192
TINY = [Case(90, 4, 4, dtype, kv_heads=2, head_dim=64) for dtype in DTYPES]
TINY_POOL_BYTES = 8 << 20


def run(gpu: Gpu, rounds: int) -> dict[str, Any]:
    """All figures."""
    free = gpu.free_bytes()
    pool_bytes = min(POOL_BYTES, int(free * POOL_SHARE) >> 21 << 21)
    shared = sharing_s(pool_bytes)
    device = device_of(gpu)
    ceiling = Ceiling(copy_gb_per_s(device, COPY_BYTES, rounds), matmul_tflops(MATMUL_SIZE, rounds))
    rows = []
    for tokens, heads, window, dtype in product(TOKENS, QUERY_HEADS, WINDOWS, DTYPES):
        case = Case(tokens, heads, window, dtype)
        timing = measured(device, case, ceiling, rounds)
        rows.append(row_of(timing, ceiling) | {"peers_ms": peer_ms(case, kept_tokens(case), rounds)})
    about = {"pool_bytes": pool_bytes, **shared}
    return {"card": card(gpu), "sharing_s": about, "ceiling": asdict(ceiling), "snapkv": rows}


def row_of(timing: Timing, ceiling: Ceiling) -> dict[str, Any]:
    """One line of the table."""
    share = timing.compact_gb_per_s / ceiling.gb_per_s
    return asdict(timing) | {"of_roofline": timing.of_roofline, "compaction_of_copy": share}


def card(gpu: Gpu) -> dict[str, str]:
    """What it was measured on."""
    names = ("torch", "numba", "numba-cuda")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "card": gpu.name,
        "driver": str(gpu.driver.version),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{found['card']['card']}: {found['sharing_s']}", f"{found['ceiling']}"]
    lines.append("tokens heads window dtype          score   of roofline  choose  compaction  peers (ms)")
    for row in found["snapkv"]:
        case, peers = row["case"], {name: round(ms, 2) for name, ms in row["peers_ms"].items()}
        lines.append(
            f"{case['tokens']:6} {case['query_heads']:5} {case['window']:6} {case['dtype']:14}"
            f"{row['score_ms']:6.2f}ms {row['of_roofline']:11.0%} {row['choose_ms']:6.2f}ms "
            f"{row['compaction_of_copy']:9.0%}  {peers}"
        )
    return "\n".join(lines)


def check(gpu: Gpu) -> str:
    """Run everything once, as small as it goes; figures of tiny shapes are none and are not shown."""
    sharing_s(TINY_POOL_BYTES)
    device = device_of(gpu)
    ceiling = Ceiling(copy_gb_per_s(device, 1 << 16, 1), matmul_tflops(64, 1))
    for case in TINY:
        row_of(measured(device, case, ceiling, 1), ceiling)
        q, k = tensors(case, "cpu")
        both = (form(q, k, 8).sort().values for form in (grouped, materialised))
        assert (next(both) == next(both)).all(), "torch's two forms choose alike"
        peer_ms(case, 8, 1)
    return f"bench-gpu: {len(TINY)} cases ran on {gpu.name}; tiny shapes, so no figures"


def main() -> None:
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    gpu = first_gpu()
    if isinstance(gpu, str):
        print(f"bench-gpu: nothing was measured; {gpu}")
    elif options.check:
        print(check(gpu))
    else:
        found = run(gpu, options.rounds)
        print(table(found))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
