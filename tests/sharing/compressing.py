"""A worker that compresses a lease by every policy: `python compressing.py RUN_DIR DEVICE`.

Prints a JSON object: for each case the kept positions, digests of the kept keys and values, the attention
retained, and whether bytes moved to other blocks.
"""

import hashlib
import json
import sys
from typing import Any

import torch

import kvd_client
from kvd_client import H2O, Dual, KeyDiff, KVSpec, Rope, SnapKV, Span, Streaming

TOKENS, WINDOW, QUERY_HEADS = 160, 8, 4
BF16 = KVSpec(layers=2, kv_heads=2, head_dim_k=64, head_dim_v=32, dtype="bfloat16")
FP32 = KVSpec(layers=2, kv_heads=2, head_dim_k=24, head_dim_v=8, dtype="float32", layout="layer_outermost")
ROOMY, TIGHT = 60, 12  # blocks; a lease has 10, its queries 1
ROPE = Rope(inv_freq=[0.5**i for i in range(12)], style="interleaved")
POLICIES = {
    "streaming": Streaming(sinks=4, window=44),
    "streaming with cache positions": Streaming(sinks=4, window=44, rope="cache"),
    "snapkv": SnapKV(window=WINDOW, keep=48),
    "dual": Dual(window=WINDOW, keep=48, kernel=7, pooling="max"),
    "h2o": H2O(sinks=4, recent=12, keep=48),
    "keydiff": KeyDiff(recent=12, keep=48),
    "span by token": Span(window=WINDOW, keep=48, kernel=9),
    "span by block": Span(window=WINDOW, keep=48, kernel=9, granularity="block"),
}
CASES: dict[str, tuple[KVSpec, int, str]] = {name: (BF16, ROOMY, name) for name in POLICIES} | {
    f"{name} in place": (FP32, TIGHT, name) for name in POLICIES if name != "span by block"
}


def filled(pool: kvd_client.Pool) -> kvd_client.Lease:
    random = torch.Generator().manual_seed(1)
    lease, spec = pool.lease(), pool.spec
    slots = lease.extend(TOKENS)
    for layer in range(spec.layers):
        k, v = (
            torch.randn(TOKENS, spec.kv_heads, dim, generator=random)
            for dim in (spec.head_dim_k, spec.head_dim_v)
        )
        lease.write(layer, slots, k, v)
    lease.commit(TOKENS)
    return lease


def compressed(client: kvd_client.Client, case: str) -> dict[str, Any]:
    spec, blocks, policy = CASES[case]
    pool = client.pool(case.replace(" ", "-"), spec, blocks)
    lease = filled(pool)
    shape = (spec.layers, WINDOW, QUERY_HEADS, spec.head_dim_k)
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    queries = queries.to(torch.float32 if spec is FP32 else torch.bfloat16)
    if policy == "h2o":
        lease.observe(queries)
    given = queries if POLICIES[policy].needs_queries else None
    rope = ROPE if policy == "streaming with cache positions" else None
    report = lease.compress(POLICIES[policy], queries=given, rope=rope)
    rows = [part for layer in range(spec.layers) for part in lease.gather(layer, "numpy")]
    found = {
        "positions": lease.kept_positions().tolist(),
        "bytes": [hashlib.sha256(part.tobytes()).hexdigest() for part in rows],
        "mass": [float(mass) for mass in report.mass_retained],
        "out_of_place": report.out_of_place,
    }
    lease.release()
    pool.close()
    return found


def main() -> None:
    with kvd_client.connect(sys.argv[1], device=sys.argv[2], timeout=120) as client:
        print(json.dumps({case: compressed(client, case) for case in CASES}))


if __name__ == "__main__":
    main()
