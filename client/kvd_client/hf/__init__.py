"""Hugging Face transformers on leased KV memory.

    attach(model)                                    # once: lets caches compress and stream
    cache = KvdCache(lease, compress="after_prefill")
    model.generate(**inputs, past_key_values=cache)  # keys and values live in the pool
    cache.reports[0]                                 # what the compression did

Works with transformers 5.2 to 5.24.
"""

from kvd_client.hf.attention import attach
from kvd_client.hf.cache import KvdCache

__all__ = ["KvdCache", "attach"]
