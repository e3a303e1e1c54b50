"""Attention said again, slowly and without kvd: what the cache's answers are held against."""

import torch

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def causal(tokens: int) -> torch.Tensor:
    """[tokens, tokens], True where the row's token sees the column's."""
    at = torch.arange(tokens)
    return at[None] <= at[:, None]


def sinks_and_window(tokens: int, sinks: int, window: int) -> torch.Tensor:
    """The streaming mask [tokens, tokens] in original positions."""
    at = torch.arange(tokens)
    return causal(tokens) & ((at[None] > at[:, None] - window) | (at[None] < sinks))


def turned(rows: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, heads, head_dim] with their rotary embedding, as products of complex numbers."""
    angles = positions[:, None].double() * inv_freq.double()
    half = HEAD_DIM // 2
    pairs = torch.complex(rows[..., :half].double(), rows[..., half:].double())
    product = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((product.real, product.imag), -1)


def streaming_llm(model, ids: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """Logits [1, tokens, vocabulary] of StreamingLLM as published: keys are stored unturned and get the
    positions 0, 1, ... inside the cache at every step."""
    decoder = model.model
    stored = [([], []) for _ in decoder.layers]
    logits = []
    for token in range(ids.shape[1]):
        seen = [at for at in range(token + 1) if at < sinks or at > token - window]
        hidden = decoder.embed_tokens(ids[0, token : token + 1])
        for layer, cache in zip(decoder.layers, stored, strict=True):
            hidden = hidden + _attend(layer, hidden, cache, seen, decoder.rotary_emb.inv_freq)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits.append(model.lm_head(decoder.norm(hidden)))
    return torch.cat(logits)[None]


def _attend(layer, hidden, cache, seen, inv_freq) -> torch.Tensor:
    normed, attention = layer.input_layernorm(hidden), layer.self_attn
    for part, project in zip(cache, (attention.k_proj, attention.v_proj), strict=True):
        part.append(project(normed).view(1, KV_HEADS, HEAD_DIM))
    positions = torch.arange(len(seen))
    keys = turned(torch.cat([cache[0][at] for at in seen]), positions, inv_freq)
    values = torch.cat([cache[1][at] for at in seen]).double()
    query = turned(attention.q_proj(normed).view(1, HEADS, HEAD_DIM), positions[-1:], inv_freq)[0]
    group = HEADS // KV_HEADS
    scores = torch.einsum("hd,nhd->hn", query, keys.repeat_interleave(group, 1)) / HEAD_DIM**0.5
    mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), values.repeat_interleave(group, 1))
    return attention.o_proj(mixed.reshape(1, -1).float())
