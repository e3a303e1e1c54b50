"""One forward pass through any cache, under any release of transformers that kvd works with."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch


@torch.inference_mode()
def advance(model: Any, cache: Any, token_ids: Sequence[int], keep_logits: int = 1) -> torch.Tensor:
    """Append tokens to `cache` and return the last `keep_logits` rows of logits [keep_logits, vocabulary].

    Works with transformers 5.2 (`past_key_values`) to 5.24 (`cache`). The tokens' positions follow from the
    cache's `get_seq_length()`, so that one has to be the true length, not the number of kept tokens.
    """
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.tensor([list(token_ids)], device=model.device)
    logits = model(ids, logits_to_keep=keep_logits, use_cache=True, **{named: cache}).logits
    return logits[0].float()  # type: ignore[no-any-return]
