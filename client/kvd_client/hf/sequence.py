"""One lease as a model sees it: forward passes read it and append to it."""

from dataclasses import dataclass

import numpy as np
import torch

from kvd.errors import ConflictError, InvalidArgumentError
from kvd.policy import Streaming
from kvd_client import Lease
from kvd_client.hf.paged import LayerViews, PagedLayers
from kvd_client.hf.plan import Ids, Target, Visible, window_visible
from kvd_client.hf.rope import Rotation


@dataclass(frozen=True)
class Forward:
    """One forward pass under way: the same plan for each of its layers."""

    new_tokens: int
    visible: Visible
    target: Target


class LeasedSequence:
    """The lease's tokens, and those of the forward pass under way, which count once it has ended."""

    def __init__(self, lease: Lease) -> None:
        spec = lease.pool.spec
        if spec.dtype.startswith("float8"):
            raise InvalidArgumentError(
                f"a pool of {spec.dtype} needs scaled keys and values, which transformers does not have; "
                f"use a bfloat16 or float32 pool"
            )
        self.lease = lease
        self.layers = spec.layers
        self.streaming = lease.policy if isinstance(lease.policy, Streaming) else None
        self.forward: Forward | None = None
        self._paged = PagedLayers([lease.pool.layer(index) for index in range(spec.layers)])

    def set_rotation(self, rotation: Rotation) -> None:
        """The model's rotary embedding, for streaming leases that renumber positions."""
        self._paged.rotation = rotation

    def visible(self) -> Visible:
        """What the next forward pass's queries may see of the tokens before it."""
        lease = self.lease
        used = _table(lease)[: lease.pool.spec.blocks_for(lease.length)]
        everything = Visible(used, lease.length, lease.position)
        return window_visible(everything, self.streaming) if self.streaming else everything

    def begin(self, new_tokens: int) -> Forward:
        """Make room for `new_tokens`. Raises what Lease.extend raises; the lease is then as before."""
        broken_off = self.forward
        if broken_off is not None and self.streaming and broken_off.new_tokens > 1:
            raise ConflictError(
                "a forward pass of several tokens broke off after the window had moved on; "
                "release this streaming lease and prefill a new one"
            )
        visible = self.visible()
        slots = self.lease.extend(new_tokens)
        target = Target.of_slots(slots, self.lease.pool.spec.block_size)
        self.forward = Forward(new_tokens, visible, target)
        return self.forward

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerViews:
        """Store a layer's new keys and values [1, kv_heads, new tokens, head_dim]; all that it reads."""
        forward = self.forward if layer else self.begin(keys.shape[-2])
        assert forward is not None, "layers are updated in order, from the first on"
        tokens = forward.visible.length + forward.new_tokens
        blocks = _table(self.lease)[: self.lease.pool.spec.blocks_for(tokens)]
        in_place = None if self.streaming else self._paged.view(layer, blocks, tokens, keys.dtype)
        seen = in_place or self._paged.read(layer, forward.visible, (keys, values))
        self._paged.write(layer, forward.target, keys, values)
        return seen

    def finish(self) -> int:
        """The forward pass has ended: how many tokens are to be committed. Raises what Lease.check does:
        then what it read may not have been the lease's."""
        forward, self.forward = self.forward, None
        assert forward is not None, "a forward pass was under way"
        self.lease.check()
        return forward.new_tokens

    def streaming_mask(self, visible: Visible, new_tokens: int) -> torch.Tensor:
        """[1, 1, new tokens, visible + new tokens]: each token sees the sinks and its own window."""
        assert self.streaming is not None
        keys = torch.from_numpy(visible.positions(new_tokens))
        queries = torch.arange(visible.position, visible.position + new_tokens)[:, None]
        in_window = keys > queries - self.streaming.window
        return ((keys <= queries) & (in_window | (keys < self.streaming.sinks)))[None, None]


def _table(lease: Lease) -> Ids:
    return lease.block_table.astype(np.int64)
