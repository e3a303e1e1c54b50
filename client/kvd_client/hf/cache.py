"""A transformers Cache whose keys and values live in the blocks of a lease."""

from typing import Any, Literal, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvd.errors import InvalidArgumentError
from kvd.policy import Policy
from kvd_client import CompressionReport, Lease
from kvd_client.hf.paged import LayerViews
from kvd_client.hf.pruning import Pruning
from kvd_client.hf.rope import Rotation
from kvd_client.hf.sequence import LeasedSequence

CompressWhen = Literal["never", "after_prefill", "bounded", "when_asked"]


class KvdCache(Cache):
    """One sequence's keys and values in a lease: `model.generate(..., past_key_values=KvdCache(lease))`.

    lease     of a pool with the model's geometry; it may hold tokens already (a shared prefix)
    compress  "never"; "after_prefill": once, after the first forward pass; "when_asked": queries are kept
              ready for `compress()`, for prompts that come in several passes; "bounded": whenever a block has
              come on top of the number of tokens to keep
    policy    what a compression keeps, if not the lease's own policy

    Batch size 1. The sequence length it reports is the true position, so that rotary embeddings stay right
    after a compression. Streaming leases and compression need an attached model (`attach`).
    `reports` has one entry for each compression.
    """

    def __init__(self, lease: Lease, compress: CompressWhen = "never", policy: Policy | None = None) -> None:
        self.sequence = LeasedSequence(lease)
        self.reports: list[CompressionReport] = []
        self._pruning = None if compress == "never" else Pruning(lease, policy or lease.policy)
        self._when = compress
        if compress == "bounded" and self._kept_ready().budget_tokens is None:
            raise InvalidArgumentError('"bounded" needs a number of tokens to keep, e.g. keep=512')
        self._attached = False
        self._asked_tokens = 0
        super().__init__(layers=[KvdLayer(self, index) for index in range(self.sequence.layers)])

    @property
    def lease(self) -> Lease:
        """The lease under it; release it when the sequence is over."""
        return self.sequence.lease

    def compress(self) -> CompressionReport:
        """Prune the lease now, between two forward passes. Raises what Lease.compress raises."""
        report = self._kept_ready().compress()
        self.reports.append(report)
        return report

    def window_queries(self) -> torch.Tensor:
        """The queries that would vote now, [layers, tokens, query_heads, head_dim], for other leases of the
        same tokens. Under H2O those that no score counts yet."""
        queries = self._kept_ready().queries
        return queries.oldest(queries.count)

    def _kept_ready(self) -> Pruning:
        if self._pruning is None:
            raise InvalidArgumentError(
                'this cache keeps no queries; make it with KvdCache(lease, "when_asked")'
            )
        return self._pruning

    def forward_begins(self, decoder: torch.nn.Module) -> None:
        """An attached decoder starts to run with this cache."""
        streaming = self.sequence.streaming
        if not self._attached and streaming is not None and streaming.rope == "cache":
            assert isinstance(decoder.rotary_emb, torch.nn.Module)
            self.sequence.set_rotation(Rotation.of_model(decoder.rotary_emb))
        self._attached = True
        if self._pruning is not None:
            self._pruning.queries.begin()

    def see_queries(self, layer: int, query: torch.Tensor) -> None:
        """A layer's queries [1, query_heads, new tokens, head_dim], after the rotary embedding."""
        if self._pruning is not None:
            self._pruning.queries.add(layer, query)

    def forward_ends(self) -> None:
        """All layers have read: the new tokens count, and blocks may move."""
        new_tokens = self.sequence.finish()
        if self._pruning is None:
            self.lease.commit(new_tokens)
            return
        self._pruning.commit(new_tokens)
        if self._when == "after_prefill" or (self._when == "bounded" and self._pruning.is_over()):
            self.compress()
        if self._when == "after_prefill":
            self._pruning = None

    def mask_of_own(self, padding_mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask [1, 1, new tokens, keys] (True: seen) where the causal one is not right: several new
        tokens in a streaming lease, each with its own window.

        padding_mask  [1, tokens] or None. Raises InvalidArgumentError if it hides tokens and the lease has
        dropped some, since then keys no longer stand at the mask's places.
        """
        visible = self.sequence.visible()
        if padding_mask is not None and visible.count < visible.position and not padding_mask.all():
            raise InvalidArgumentError(
                "the attention_mask hides tokens, but the lease has dropped some; send no padding"
            )
        if self.sequence.streaming is None or self._asked_tokens == 1:
            return None
        return self.sequence.streaming_mask(visible, self._asked_tokens)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerViews:
        """Store a layer's new keys and values; all keys and values that its attention reads."""
        if layer == 0:
            self._check(keys, values)
        seen = self.sequence.update(layer, keys, values)
        if layer == self.sequence.layers - 1 and not self._attached:
            self.lease.commit(self.sequence.finish())
        return seen

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        spec = self.lease.pool.spec
        given = (*keys.shape[:2], keys.shape[3], values.shape[3])
        wanted = (1, spec.kv_heads, spec.head_dim_k, spec.head_dim_v)
        if given != wanted:
            raise InvalidArgumentError(
                f"(batch, kv_heads, head_dim_k, head_dim_v) is {given}, the lease has {wanted}; "
                f"a lease holds one sequence, and its pool's geometry must be the model's"
            )
        if not self._attached and (self._pruning is not None or self.sequence.streaming is not None):
            raise InvalidArgumentError("streaming and compression need kvd_client.hf.attach(model) first")

    def mask_sizes(self, new_tokens: int) -> tuple[int, int]:
        """Keys that attention will get, and the position the first would have if none had been dropped."""
        self._asked_tokens = new_tokens
        visible = self.sequence.visible()
        return visible.count + new_tokens, visible.position - visible.count


class KvdLayer(CacheLayerMixin):
    """One layer of a KvdCache, as transformers 5.2 to 5.24 know it."""

    is_sliding = False

    def __init__(self, cache: KvdCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> LayerViews:
        """See KvdCache.append."""
        return self._cache.append(self._index, key_states, value_states)

    def get_mask_sizes(self, new: torch.Tensor | int) -> tuple[int, int]:
        """`new` is the new tokens' count, or in older releases their positions."""
        return self._cache.mask_sizes(new if isinstance(new, int) else new.shape[0])

    def get_seq_length(self) -> int:
        """The next token's true position."""
        return self._cache.lease.position

    def get_max_length(self) -> int:
        """No limit but the pool's: -1, as transformers has it."""
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there."""

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgumentError(
            "a leased cache grows and is compressed, but knows no beams, rollback, reset or offloading; "
            "use greedy search or sampling, and a new lease for a new sequence"
        )

    crop = reset = reorder_cache = offload = prefetch = _refused
    batch_repeat_interleave = batch_select_indices = _refused
