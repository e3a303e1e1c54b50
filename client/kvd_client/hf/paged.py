"""Keys and values of one sequence, between the pool's blocks and the shape that attention takes."""

from collections.abc import Sequence

import numpy as np
import torch

from kvd_client.hf.plan import Ids, Target, Visible
from kvd_client.hf.rope import Rotation

COPIED_RUNS = 8  # a table of so few runs is copied run by run, twice as fast as block by block
GROWTH = 1.25  # times what is needed when a buffer grows, so that decoding rarely grows it

LayerViews = tuple[torch.Tensor, torch.Tensor]


class PagedLayers:
    """The pool's layers, and two buffers into which one layer at a time is gathered.

    views  per layer K and V, each [blocks, block_size, kv_heads, head_dim], strided, of the pool's dtype

    What `read` returns is overwritten by the next layer's `read`, unless it is a view of the pool.
    """

    def __init__(self, views: Sequence[LayerViews]) -> None:
        self._views = views
        self.rotation: Rotation | None = None
        self._buffers: list[torch.Tensor | None] = [None, None]

    def write(self, layer: int, target: Target, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens of keys and values [rows, kv_heads, new columns, head_dim] in their blocks."""
        ids = (target.rows, target.columns, target.blocks, target.offsets)
        rows, columns, blocks, offsets = (torch.from_numpy(each) for each in ids)
        for view, states in zip(self._views[layer], (keys, values), strict=True):
            tokens = states.transpose(1, 2)
            is_every = rows.numel() == tokens.shape[0] * tokens.shape[1]
            chosen = tokens.flatten(0, 1) if is_every else tokens[rows, columns]
            view[blocks, offsets] = chosen.to(view.dtype)

    def view(self, layer: int, blocks: Ids, tokens: int, dtype: torch.dtype) -> LayerViews | None:
        """The first `tokens` tokens of `blocks` without a copy, if they lie in one row (consecutive blocks of
        a layer-outermost pool) and are of `dtype` already. None otherwise."""
        k, v = (_one_row(view, blocks) for view in self._views[layer])
        if k is None or v is None or k.dtype != dtype:
            return None
        return k[:tokens].transpose(0, 1)[None], v[:tokens].transpose(0, 1)[None]

    def read(self, layer: int, visible: Sequence[Visible], width: int, new: LayerViews) -> LayerViews:
        """Gathered copies [rows, kv_heads, width + new columns, head_dim], in the dtype of `new`: each row's
        visible tokens end at `width`, and zeros are left of them.

        Must be called before `write`: the blocks are read as they were before the new tokens.
        """
        k, v = (self._gather(layer, part, visible, width, new[part]) for part in (0, 1))
        return k, v

    def _gather(
        self, layer: int, part: int, visible: Sequence[Visible], width: int, new: torch.Tensor
    ) -> torch.Tensor:
        view, new_tokens = self._views[layer][part], new.transpose(1, 2)
        block_size = view.shape[1]
        end = max(width, *(each.length for each in visible))
        room = end + max(block_size, new_tokens.shape[1])
        buffer = self._buffer(part, room, new_tokens)
        for row, each in enumerate(visible):
            first = self._gather_row(part, each, buffer[row, end - each.length :], view)
            buffer[row, end - width : end - each.length + first] = 0
        buffer[:, end : end + new_tokens.shape[1]] = new_tokens.to(view.dtype)
        return buffer[:, end - width : end + new_tokens.shape[1]].transpose(1, 2)

    def _gather_row(self, part: int, visible: Visible, buffer: torch.Tensor, view: torch.Tensor) -> int:
        """Copy a row's blocks to the front of `buffer`; the first slot to be seen."""
        blocks = buffer[: visible.blocks.size * view.shape[1]].view(-1, *view.shape[1:])
        if len(visible.runs) <= COPIED_RUNS:
            for at, first, count in visible.runs:
                blocks[at : at + count] = view[first : first + count]
        else:
            blocks.copy_(view[torch.from_numpy(visible.blocks)])
        return self._place_sinks(part, visible, buffer)

    def _place_sinks(self, part: int, visible: Visible, buffer: torch.Tensor) -> int:
        """Put the sinks right before the window, over slots nobody sees; the first slot to be seen."""
        first = visible.start - visible.sinks
        if first == 0 and visible.sink_shift == 0:
            return 0
        sinks = buffer[: visible.sinks].clone()
        if part == 0 and visible.sink_shift:
            assert self.rotation is not None
            sinks = self.rotation.moved(sinks, visible.sink_shift)
        buffer[first : visible.start] = sinks
        return first

    def _buffer(self, part: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """[rows, tokens or more, kv_heads, head_dim] as of the last call."""
        buffer = self._buffers[part]
        if buffer is None or buffer.shape[1] < tokens or buffer.dtype != like.dtype:
            buffer = like.new_empty((like.shape[0], int(tokens * GROWTH), *like.shape[2:]))
            self._buffers[part] = buffer
        return buffer


def _one_row(view: torch.Tensor, blocks: Ids) -> torch.Tensor | None:
    """[tokens, kv_heads, head_dim] from the first of `blocks` on, or None if they lie apart."""
    block_size = view.shape[1]
    adjacent = view.stride(0) == block_size * view.stride(1) and bool((np.diff(blocks) == 1).all())
    if not adjacent or blocks.size == 0:
        return None
    return view.flatten(0, 1)[int(blocks[0]) * block_size :]
