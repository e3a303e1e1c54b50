"""The rows of a batch, a lease each, as a model sees them: forward passes read them and append to them.

The model's columns are what it was fed: tokens, and padding where the attention mask is 0, which takes no
slot of any lease. Keys and values come as wide as the widest row, its tokens at the right edge.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvd.errors import ConflictError, InvalidArgumentError
from kvd_client import Lease
from kvd_client.hf.paged import LayerViews, PagedLayers
from kvd_client.hf.plan import Bools, Target, Visible
from kvd_client.hf.rope import Rotation
from kvd_client.hf.sequence import LeasedSequence


@dataclass(frozen=True)
class Forward:
    """One forward pass under way: the same plan for each of its layers.

    is_token  [rows, new columns]: False where a column is padding
    """

    is_token: Bools
    visible: list[Visible]
    target: Target
    width: int


class LeasedBatch:
    """The leases' tokens, and those of the forward pass under way, which count once it has ended."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.rows = [LeasedSequence(lease) for lease in leases]
        if not self.rows:
            raise InvalidArgumentError("a cache without leases; pass one, or one for each row of the batch")
        self.pool = leases[0].pool
        if any(lease.pool.pool_id != self.pool.pool_id for lease in leases):
            raise InvalidArgumentError("leases of several pools; the rows of a batch lie in one pool")
        if len({lease.lease_id for lease in leases}) != len(leases):
            raise InvalidArgumentError("one lease for two rows; each row of a batch needs its own")
        columns = max(row.columns for row in self.rows)
        for row in self.rows:
            row.pads = columns - row.columns
        self.forward: Forward | None = None
        self._paged = PagedLayers([self.pool.layer(index) for index in range(self.pool.spec.layers)])

    @property
    def columns(self) -> int:
        """What the model was fed so far, and so the position it counts for the next column."""
        return self.rows[0].columns

    @property
    def streams(self) -> bool:
        return any(row.streaming is not None for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """Whether every column is where the model thinks it is: nothing is dropped, all padding is left."""
        return not self.streams and all(
            row.pads_are_left and row.lease.length == row.lease.position for row in self.rows
        )

    @property
    def renumbers(self) -> bool:
        """Whether a streaming lease needs the model's rotary embedding."""
        return any(row.streaming is not None and row.streaming.rope == "cache" for row in self.rows)

    def set_rotation(self, rotation: Rotation) -> None:
        """The model's rotary embedding, for streaming leases that renumber positions."""
        self._paged.rotation = rotation

    def visible(self) -> list[Visible]:
        """Of each row, what the next forward pass may see of the tokens before it."""
        return [row.visible() for row in self.rows]

    def width(self, visible: Sequence[Visible]) -> int:
        """Columns of keys before the new ones: all, less what even the widest row has dropped."""
        return self.columns - min(each.position - each.count for each in visible)

    def width_now(self) -> int:
        return self.width(self.visible())

    def fills_width(self) -> bool:
        """Whether no row has padding in its keys."""
        visible = self.visible()
        return all(each.count == self.width(visible) for each in visible)

    def begin(self, is_token: Bools) -> None:
        """Make room for new tokens. Raises what Lease.extend raises; the leases are then as before."""
        broken_off = self.forward
        if broken_off is not None and self.streams and broken_off.is_token.shape[1] > 1:
            raise ConflictError(
                "a forward pass of several tokens broke off after the window had moved on; "
                "release this streaming lease and prefill a new one"
            )
        visible = self.visible()
        width = self.width(visible)
        leases, counts = [row.lease for row in self.rows], is_token.sum(1).tolist()
        slots = self.pool.extend_many(leases, counts)
        targets = [
            Target.of_slots(row, np.flatnonzero(is_token[row]), slots[row], self.pool.spec.block_size)
            for row in range(len(leases))
        ]
        self.forward = Forward(is_token, visible, Target.joined(targets), width)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerViews:
        """Store a layer's new keys and values [rows, kv_heads, new columns, head_dim]; all that it reads."""
        forward = self.forward
        assert forward is not None, "a forward pass was begun"
        new = (keys, values)
        seen = self._in_place(forward, layer, keys.dtype) or self._paged.read(
            layer, forward.visible, forward.width, new
        )
        self._paged.write(layer, forward.target, *new)
        return seen

    def _in_place(self, forward: Forward, layer: int, dtype: torch.dtype) -> LayerViews | None:
        """Views of the pool, where a single row lies there as attention takes it."""
        length = forward.visible[0].length
        if len(self.rows) > 1 or self.streams or forward.width != length or not forward.is_token.all():
            return None
        tokens = length + forward.is_token.shape[1]
        blocks = self.rows[0].table()[: self.pool.spec.blocks_for(tokens)]
        return self._paged.view(layer, blocks, tokens, dtype)

    def tokens_of(self, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each row's tokens [heads, tokens, head_dim] of states [rows, heads, new columns, head_dim]."""
        assert self.forward is not None, "a forward pass was begun"
        for row, is_token in zip(states, self.forward.is_token, strict=True):
            yield row if is_token.all() else row[:, torch.from_numpy(is_token)]

    def finish(self) -> list[int]:
        """The forward pass has ended: how many tokens are to be committed in each row. Raises what
        Lease.check does: then what it read may not have been the leases'."""
        forward, self.forward = self.forward, None
        assert forward is not None, "a forward pass was under way"
        for row in self.rows:
            row.lease.check()
        for row, is_token in zip(self.rows, forward.is_token, strict=True):
            row.add_pads(is_token)
        return [int(count) for count in forward.is_token.sum(1)]

    def mask(self, is_token: Bools) -> torch.Tensor:
        """[rows, 1, new columns, width + new columns], True where a query sees a key."""
        visible = self.visible()
        new, width = is_token.shape[1], self.width(visible)
        mask = np.zeros((len(self.rows), 1, new, width + new), np.bool_)
        for row, each in enumerate(visible):
            mask[row, 0, :, width - each.count :] = self.rows[row].seen(each, is_token[row])
        return torch.from_numpy(mask)
