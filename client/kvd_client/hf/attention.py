"""Joining a transformers model to its kvd caches: masks, queries, and the moment a forward pass ends.

`attach` gives the model an attention implementation of its own, "kvd", which is transformers' sdpa with
three additions: window queries are taken on the way, a streaming lease's windows slide per query, and rows
of a batch may have dropped different tokens.
"""

import threading
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvd.arguments import refused
from kvd.errors import InvalidArgumentError
from kvd_client.hf.cache import KvdCache

IMPLEMENTATION = "kvd"
CACHE_ARGUMENTS = ("past_key_values", "cache")  # transformers before 5.24, and from then on

_running = threading.local()  # .cache: the KvdCache of the forward pass this thread is in
_attached: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def attach(model: PreTrainedModel) -> None:
    """Let `model`'s KvdCaches compress and stream. Once per model; dense leases do without it.

    Raises InvalidArgumentError if it is no transformers model, or does not use transformers' sdpa attention.
    """
    if not isinstance(model, PreTrainedModel):
        raise refused("model", model, "a transformers PreTrainedModel")
    decoder = model.base_model
    if decoder in _attached:
        return
    if model.config._attn_implementation != "sdpa":
        raise InvalidArgumentError(
            f"the model's attention is {model.config._attn_implementation!r}; "
            f'load it with attn_implementation="sdpa", which kvd extends'
        )
    AttentionInterface.register(IMPLEMENTATION, kvd_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, kvd_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
    decoder.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)
    _attached.add(decoder)


def kvd_attention(
    module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, which also shows the queries [rows, query_heads, new columns, head_dim] to the
    cache."""
    cache = running_cache()
    if cache is not None:
        cache.see_queries(int(module.layer_idx), query)  # type: ignore[arg-type]
    return sdpa_attention_forward(module, query, *args, **kwargs)


def kvd_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' sdpa mask, or the cache's own one [rows, 1, new columns, keys]."""
    cache = running_cache()
    own = cache.mask_of_own() if cache is not None else None
    if own is not None:
        return own
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def running_cache() -> KvdCache | None:
    """The KvdCache of the forward pass this thread is in, if its model is attached."""
    return getattr(_running, "cache", None)


def _before_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = [*args, *(kwargs.get(name) for name in CACHE_ARGUMENTS)]
    cache = next((each for each in given if isinstance(each, KvdCache)), None)
    if cache is not None:
        cache.forward_begins(module, kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
    _running.cache = cache


def _after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    cache, _running.cache = running_cache(), None
    if cache is not None and output is not None:  # none: the forward raised
        cache.forward_ends()
