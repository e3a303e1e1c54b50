"""A transformers Cache whose keys and values live in the blocks of leases."""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvd.arguments import listed, one_of, whole
from kvd.convert import policy_to_proto
from kvd.errors import InvalidArgumentError
from kvd.policy import Policy
from kvd_client import CompressionReport, Lease
from kvd_client.hf.batch import LeasedBatch
from kvd_client.hf.padding import Padding
from kvd_client.hf.paged import LayerViews
from kvd_client.hf.pruning import Pruning
from kvd_client.hf.rope import Rotation

LEASES = "a lease, or a list of them,"
CompressWhen = Literal["never", "after_prefill", "bounded", "when_asked"]


class KvdCache(Cache):
    """Keys and values in a lease: `model.generate(..., past_key_values=KvdCache(lease))`.

    lease     of a pool with the model's geometry; it may hold tokens already (a shared prefix). For a batch
              a list of leases, one for each row
    compress  "never"; "after_prefill": once, after the first forward pass, unless the prompt is too short
              for the policy; "when_asked": queries are kept ready for `compress()`, for prompts that come in
              several passes; "bounded": whenever a block has come on top of the number of tokens to keep
    policy    what a compression keeps, if not the lease's own policy

    Padding, as generate() tells it by `attention_mask`, takes no slot: a row's lease holds its tokens, and
    each row is compressed by itself. The sequence length reported is the true position, padding included, so
    that rotary embeddings stay right after a compression. Streaming leases, compression, and batches need an
    attached model (`attach`). `reports` has one entry for each compression, rows in order.

    Raises InvalidArgumentError on anything else, and for leases of several pools.
    """

    def __init__(
        self, lease: Lease | Sequence[Lease], compress: CompressWhen = "never", policy: Policy | None = None
    ) -> None:
        one_of("compress", compress, get_args(CompressWhen))
        leases = [lease] if isinstance(lease, Lease) else listed("lease", lease, LEASES)
        if policy is not None:
            policy_to_proto(policy)
            if compress == "never":
                raise InvalidArgumentError(f'{policy} for a cache that compresses "never"; say when')
        self.batch = LeasedBatch(leases)
        self.reports: list[CompressionReport] = []
        pruned = leases if compress != "never" else []
        self._prunings = [Pruning(each, policy or each.policy) for each in pruned]
        self._when = compress
        if compress == "bounded":
            for pruning in self._prunings:
                pruning.check_bound()
        self._attached = False
        self._padding = Padding(self.batch, None)
        self._asked_columns = 0
        layers = range(self.batch.pool.spec.layers)
        super().__init__(layers=[KvdLayer(self, index) for index in layers])

    @property
    def leases(self) -> list[Lease]:
        """The leases under it, one for each row; release them when the sequences are over."""
        return [row.lease for row in self.batch.rows]

    @property
    def lease(self) -> Lease:
        """The lease of a cache of one row. Raises InvalidArgumentError if there are more."""
        if len(self.batch.rows) > 1:
            raise InvalidArgumentError(f"a cache of {len(self.batch.rows)} leases; see `leases`")
        return self.batch.rows[0].lease

    def compress(self) -> list[CompressionReport]:
        """Prune now, between two forward passes, row by row; a report for each. Raises what Lease.compress
        raises; the rows before that one are compressed then, and in `reports`."""
        reports = []
        for pruning in self._kept_ready():
            reports.append(pruning.compress())
            self.reports.append(reports[-1])
        return reports

    def window_queries(self, row: int = 0) -> torch.Tensor:
        """The queries that would vote now, [layers, tokens, query_heads, head_dim], for other leases of the
        same tokens. Under H2O those that no score counts yet."""
        ready = self._kept_ready()
        return ready[whole("row", row, 0, len(ready) - 1)].newest_queries()

    def _kept_ready(self) -> list[Pruning]:
        if not self._prunings:
            raise InvalidArgumentError(
                'this cache keeps no queries; make it with KvdCache(lease, "when_asked")'
            )
        return self._prunings

    def forward_begins(self, decoder: torch.nn.Module, attention_mask: Any) -> None:
        """An attached decoder starts to run with this cache."""
        if not self._attached and self.batch.renumbers:
            assert isinstance(decoder.rotary_emb, torch.nn.Module)
            self.batch.set_rotation(Rotation.of_model(decoder.rotary_emb))
        self._attached = True
        self._padding = Padding(self.batch, attention_mask)
        for pruning in self._prunings:
            pruning.queries.begin()

    def see_queries(self, layer: int, query: torch.Tensor) -> None:
        """A layer's queries [rows, query_heads, new columns, head_dim], after the rotary embedding."""
        for pruning, tokens in zip(self._prunings, self.batch.tokens_of(query), strict=False):
            pruning.queries.add(layer, tokens)

    def forward_ends(self) -> None:
        """All layers have read: the new tokens count, and blocks may move."""
        new_tokens = self.batch.finish()
        if not self._prunings:
            self._commit(new_tokens)
            return
        for pruning, count in zip(self._prunings, new_tokens, strict=True):
            pruning.commit(count)
        self._prune()

    def _prune(self) -> None:
        if self._when == "after_prefill":
            self.reports += [pruning.compress_prompt() for pruning in self._prunings]
            self._prunings = []
        elif self._when == "bounded":
            self.reports += [pruning.compress() for pruning in self._prunings if pruning.is_over()]

    def _commit(self, new_tokens: Sequence[int]) -> None:
        for lease, count in zip(self.leases, new_tokens, strict=True):
            lease.commit(count)

    def mask_of_own(self) -> torch.Tensor | None:
        """The mask [rows, 1, new columns, keys] (True: seen) where transformers' one is not right: rows that
        dropped tokens beside rows with others, and windows that slide."""
        return self._padding.mask(self._asked_columns)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerViews:
        """Store a layer's new keys and values; all keys and values that its attention reads."""
        if layer == 0:
            self._check(keys, values)
            self.batch.begin(self._padding.new_tokens(keys.shape[2]))
        seen = self.batch.update(layer, keys, values)
        if layer == self.batch.pool.spec.layers - 1 and not self._attached:
            self._commit(self.batch.finish())
        return seen

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        spec, rows = self.batch.pool.spec, len(self.batch.rows)
        given = (*keys.shape[:2], keys.shape[3], values.shape[3])
        wanted = (rows, spec.kv_heads, spec.head_dim_k, spec.head_dim_v)
        if given != wanted:
            raise InvalidArgumentError(
                f"(batch, kv_heads, head_dim_k, head_dim_v) is {given}, the leases have {wanted}; a lease "
                f"holds one sequence, KvdCache([lease, ...]) a batch; the pool's geometry must be the model's"
            )
        if not self._attached and (self._prunings or self.batch.streams or rows > 1):
            raise InvalidArgumentError(
                "streaming, compression and batches need kvd_client.hf.attach(model) first"
            )

    def mask_sizes(self, new_columns: int) -> tuple[int, int]:
        """Keys that attention will get, and the position the first would have if none had been dropped."""
        self._asked_columns = new_columns
        width = self.batch.width_now()
        return width + new_columns, self.batch.columns - width


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
        """`new` is the new columns' count, or in older releases their positions."""
        return self._cache.mask_sizes(new if isinstance(new, int) else new.shape[0])

    def get_seq_length(self) -> int:
        """The next column's true position."""
        return self._cache.batch.columns

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
