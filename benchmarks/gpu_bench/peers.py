"""The same choice by torch, in two forms, and by the kvpress package."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_bench.lease import Case
from torch.nn import functional

KERNEL = 5  # tokens of the average pooling
MAX_FORM_BYTES = 8 << 30  # bytes of one form's largest temporary; beyond, it is left out


def tensors(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [query_heads, window, D], keys [kv_heads, N, D]: bfloat16, also where the pool has fp8."""
    make = torch.Generator(device).manual_seed(case.tokens)
    sizes = ((case.query_heads, case.window), (case.kv_heads, case.tokens))
    q, k = (
        torch.randn(*size, case.head_dim, device=device, generator=make, dtype=torch.float32).bfloat16()
        for size in sizes
    )
    return q, k


def grouped(q: torch.Tensor, k: torch.Tensor, count: int) -> torch.Tensor:
    """The group's rows folded into one matmul per kv head; kept slots before the window [kv_heads, count]."""
    kv_heads, window = k.shape[0], q.shape[1]
    scores = q.reshape(kv_heads, -1, q.shape[2]) @ k.transpose(1, 2)
    scaled = scores.reshape(q.shape[0], window, -1).float() * q.shape[2] ** -0.5
    return _chosen(scaled, kv_heads, count)


def materialised(q: torch.Tensor, k: torch.Tensor, count: int) -> torch.Tensor:
    """Keys repeated for every query head, as the published code does."""
    repeated = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scaled = (q @ repeated.transpose(1, 2)).float() * q.shape[2] ** -0.5
    return _chosen(scaled, k.shape[0], count)


def _chosen(scores: torch.Tensor, kv_heads: int, count: int) -> torch.Tensor:
    """From float32 [query_heads, window, N]: softmax, votes, pooling, top-k."""
    heads, window, tokens = scores.shape
    hidden = torch.full((window, window), float("-inf"), device=scores.device).triu(1)
    scores[:, :, tokens - window :] += hidden
    attention = scores.softmax(-1)[:, :, : tokens - window].sum(1)
    votes = attention.reshape(kv_heads, heads // kv_heads, -1).mean(1)
    pooled = functional.avg_pool1d(votes[None], KERNEL, 1, KERNEL // 2)[0]
    return pooled.topk(count, dim=-1).indices


def kvpress_choice(case: Case, keys: torch.Tensor, device: str) -> Callable[[], Any] | None:
    """Its SnapKVPress on those keys, queries made by a real attention layer; None if it is not installed."""
    try:
        from kvpress import SnapKVPress  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    hidden_size = case.query_heads * case.head_dim
    config = LlamaConfig(
        hidden_size=hidden_size,
        num_attention_heads=case.query_heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
    )
    layer = LlamaAttention(config, 0).to(device, torch.bfloat16)
    hidden = torch.zeros(1, 1, hidden_size, device=device, dtype=torch.bfloat16)
    turns = torch.ones(1, case.window, case.head_dim, device=device, dtype=torch.bfloat16)
    press = SnapKVPress(compression_ratio=0.85, window_size=case.window, kernel_size=KERNEL)
    given = {"position_embeddings": (turns, turns)}
    seen, many = keys[None], hidden.expand(1, case.tokens, -1)
    return lambda: press.score(layer, many, seen, seen, None, given).topk(case.tokens * 15 // 100, dim=-1)


def milliseconds(work: Callable[[], Any], rounds: int) -> float:
    """On CUDA, by events; the median after a round that warms up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(rounds + 1):
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def peer_ms(case: Case, count: int, rounds: int) -> dict[str, float]:
    """By form; empty without a torch for CUDA."""
    if not torch.cuda.is_available():
        return {}
    q, k = tensors(case, "cuda")
    forms: dict[str, Callable[[], Any] | None] = {"grouped": lambda: grouped(q, k, count)}
    temporary = 4 * case.query_heads * case.window * case.tokens + case.query_heads * k[0].nbytes
    if temporary <= MAX_FORM_BYTES:
        forms["materialised"] = lambda: materialised(q, k, count)
    forms["kvpress"] = kvpress_choice(case, k, "cuda")
    with torch.inference_mode():
        return {name: milliseconds(work, rounds) for name, work in forms.items() if work is not None}
