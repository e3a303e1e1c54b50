"""The worker that reads a long document once and answers a question under one policy after the other."""

import sys
import time
from pathlib import Path

import kvd_client
from kvd_client import H2O, Dual, KVSpec, Policy, SnapKV, Span, Streaming
from kvd_demo.demo.pool import (
    BLOCK_SIZE,
    CALL_TIMEOUT_S,
    HANDED_OVER,
    KEEP,
    POOL,
    POOL_BLOCKS,
    SHELF_S,
    tell,
)
from kvd_demo.demo.question import Question
from kvd_demo.sealed_prompt import Pruned, SealedPrompt

WIDE = 21  # tokens; a pooling width that reaches from a question's cue to the end of its answer


def policies(kept_tokens: int, question_tokens: int) -> dict[str, Policy]:
    """By name as shown, all with the same budget."""
    half = kept_tokens // 2
    return {
        "StreamingLLM": Streaming(4, kept_tokens - 4),
        "H2O, half recent": H2O(recent=half, keep=kept_tokens),
        "SnapKV, as published": SnapKV(window=32, kernel=5, pooling="avg", keep=KEEP),
        "SnapKV, tuned: max 21": SnapKV(window=32, kernel=WIDE, pooling="max", keep=KEEP),
        "Dual: sinks, SnapKV": Dual(window=32, kernel=WIDE, pooling="max", keep=KEEP),
        "Span, by token": Span(window=question_tokens, kernel=WIDE, keep=KEEP),
        "Span, by block": Span(window=question_tokens, kernel=WIDE, keep=KEEP, granularity="block"),
    }


def main() -> None:
    question = Question()
    ids, sample = question.ids, question.sample
    tell("prompt", tokens=len(ids), question=sample.question, answer=sample.answer)
    with kvd_client.connect(name="reader", timeout=CALL_TIMEOUT_S) as client:
        spec = KVSpec.from_hf(question.model.config, dtype="float32", block_size=BLOCK_SIZE)
        pool = client.pool(POOL, spec, POOL_BLOCKS)
        prompt = SealedPrompt(pool, ids[:-1])  # the last token is fed after the compression
        started = time.monotonic()
        prompt.read(question.model, lambda tokens: tell("prefill", tokens=tokens))
        read_s = time.monotonic() - started
        with prompt.lease() as lease:
            tell("dense", blocks=int(lease.block_table.size), text=question.ask(lease))
        kept_tokens = Span(keep=KEEP).target_tokens(len(ids) - 1, BLOCK_SIZE)
        for name, policy in policies(kept_tokens, len(sample.question_ids) - 1).items():
            tell("compressing", name=name)
            pruned = prompt.pruned(policy)
            with pruned.lease as lease:
                facts = _facts(pruned)
                tell("row", name=name, text=question.ask(lease), **facts)
        prompt.save(Path(sys.argv[1]))
        whole, pruned_key = HANDED_OVER
        prompt.pruned(policies(kept_tokens, len(sample.question_ids) - 1)["Span, by token"]).lease.publish(
            pruned_key, SHELF_S
        )
        prompt.lease().publish(whole, SHELF_S)
        tell("published", read_seconds=read_s)


def _facts(pruned: Pruned) -> dict[str, object]:
    report = pruned.report
    return {
        "blocks_before": report.blocks_before,
        "blocks_after": report.blocks_after,
        "shared": pruned.lease.sealed_blocks,
        "mass": float(report.mass_retained.mean()) if report.mass_retained.size else None,
        "seconds": pruned.seconds,
        "moved": report.out_of_place,
    }


if __name__ == "__main__":
    main()
