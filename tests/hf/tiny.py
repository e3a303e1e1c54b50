"""A tiny random Llama, and the words in which transformers' releases differ."""

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvd_client import KVSpec

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 16
VOCABULARY, BLOCK_SIZE, POOL_BLOCKS = 97, 8, 96
ROPE_TABLE = 64  # positions the model is made for; streams go past it
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"


def tiny_model() -> LlamaForCausalLM:
    """The same weights each time."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=ROPE_TABLE,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for projection in ("q_proj", "k_proj"):  # sharp attention, so that pruning shows
        for layer in model.model.layers:
            getattr(layer.self_attn, projection).weight.mul_(12)
    model.generation_config.update(pad_token_id=0, eos_token_id=None, do_sample=False)
    return model


def pool_spec(layout: str = "block_outermost", dtype: str = "float32") -> KVSpec:
    return KVSpec(LAYERS, KV_HEADS, HEAD_DIM, dtype, block_size=BLOCK_SIZE, layout=layout)


def some_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    """[1, tokens]"""
    return torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def forward(model, ids: torch.Tensor, cache=None, **others) -> torch.Tensor:
    """Logits [1, tokens, vocabulary]."""
    return model(ids, **{CACHE: cache}, **others).logits


def in_steps(model, ids: torch.Tensor, cache, steps) -> torch.Tensor:
    """Logits of consecutive forward passes over `steps` tokens each."""
    assert sum(steps) == ids.shape[1]
    return torch.cat([forward(model, part, cache) for part in ids.split(list(steps), dim=1)], dim=1)


def generate(model, ids: torch.Tensor, new_tokens: int, cache=None, **others) -> torch.Tensor:
    given = {} if cache is None else {CACHE: cache}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **given, **others)


def dynamic_cache(model) -> DynamicCache:
    return DynamicCache(config=model.config)
