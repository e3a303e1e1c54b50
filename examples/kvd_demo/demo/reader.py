"""The worker that reads a long document once and answers a question under one policy after the other."""

import sys
from pathlib import Path

import torch
from quality.tasks import NUMBER_AMONG_FIVE, Haystack, Spot, make_sample

import kvd_client
from kvd_client import H2O, Dual, KVSpec, Policy, SnapKV, Span, Streaming
from kvd_client.hf import KvdCache, attach
from kvd_demo.demo.pool import BLOCK_SIZE, CALL_TIMEOUT_S, KEEP, POOL, POOL_BLOCKS, PROMPT_TOKENS, tell
from kvd_demo.prose import prose
from kvd_demo.sealed_prompt import Pruned, SealedPrompt
from kvd_demo.smollm2 import load_model, load_tokenizer

SPOT = Spot(PROMPT_TOKENS, depth=0.4, seed=3)  # one that the model answers with all tokens in view
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
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(torch.float32), load_tokenizer()
    attach(model)
    sample = make_sample(Haystack(tokenizer, prose()), NUMBER_AMONG_FIVE, SPOT)
    ids = sample.document_ids + sample.question_ids
    tell("prompt", tokens=len(ids), question=sample.question, answer=sample.answer)

    def ask(lease: kvd_client.Lease) -> str:
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=KvdCache(lease),
            max_new_tokens=len(sample.answer_ids),
            do_sample=False,
        )
        return str(tokenizer.decode(output[0, len(ids) :])).strip()

    with kvd_client.connect(name="reader", timeout=CALL_TIMEOUT_S) as client:
        spec = KVSpec.from_hf(model.config, dtype="float32", block_size=BLOCK_SIZE)
        pool = client.pool(POOL, spec, POOL_BLOCKS)
        prompt = SealedPrompt(pool, ids[:-1])  # the last token is fed after the compression
        prompt.read(model, lambda tokens: tell("prefill", tokens=tokens))
        with prompt.lease() as lease:
            tell("dense", blocks=int(lease.block_table.size), text=ask(lease))
        kept_tokens = Span(keep=KEEP).target_tokens(len(ids) - 1, BLOCK_SIZE)
        for name, policy in policies(kept_tokens, len(sample.question_ids) - 1).items():
            tell("compressing", name=name)
            pruned = prompt.pruned(policy)
            with pruned.lease as lease:
                facts = _facts(pruned)
                tell("row", name=name, text=ask(lease), **facts)
        prompt.save(Path(sys.argv[1]))


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
