"""Perplexity of a long text read through streaming leases: dense, window only, sinks + window in both modes.

    python -m quality.streaming [--tokens 8192] [--window 1020]

Every mode reads the same tokens through its own lease, 64 at a time; the text is scored behind the window.
"""

import argparse
import json
import os
import time
from typing import Any

import torch
from kvd_demo.prose import prose
from kvd_demo.smollm2 import load_model, load_tokenizer

import kvd_client
from kvd.policy import DEFAULT_SINKS, Dense, Policy, Streaming
from kvd_client.hf import KvdCache, attach

from .perplexity import perplexity
from .run import kvd_running, results_file

BLOCK_SIZE = 16  # tokens


def modes(window: int) -> dict[str, Policy]:
    """By name as printed; all but dense hold the same number of tokens."""
    return {
        "dense": Dense(),
        "window only": Streaming(sinks=0, window=window + DEFAULT_SINKS),
        "sinks + window, original positions": Streaming(window=window),
        "sinks + window, cache positions": Streaming(window=window, rope="cache"),
    }


def measure(token_count: int, window: int) -> list[dict[str, Any]]:
    """One row a mode."""
    torch.set_num_threads(1)
    model = load_model(torch.float32)
    attach(model)
    ids = load_tokenizer().encode(prose())[:token_count]
    spec = kvd_client.KVSpec.from_hf(model.config, dtype="float32", block_size=BLOCK_SIZE)
    rows = []
    with kvd_client.connect(name="quality-streaming") as client:
        pool = client.pool("streaming", spec, blocks=token_count // BLOCK_SIZE + 64)
        for name, policy in modes(window).items():
            started = time.process_time()
            with pool.lease(BLOCK_SIZE, policy) as lease:
                score = perplexity(model, KvdCache(lease), ids, skip=window + DEFAULT_SINKS)
                rows.append(
                    {
                        "mode": name,
                        "perplexity": score.value,
                        "scored_tokens": score.token_count,
                        "blocks": int(lease.block_table.size),
                        "position": lease.position,
                        "cpu_seconds": time.process_time() - started,
                    }
                )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure and keep beside the other quality results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1020)
    options = parser.parse_args()
    with kvd_running() as environment:
        os.environ.update(environment)
        rows = measure(options.tokens, options.window)
    path = results_file().with_name("streaming.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tokens": options.tokens, "window": options.window, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
