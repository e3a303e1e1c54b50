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
        """Store rows of keys and values [1, kv_heads, new tokens, head_dim] in their blocks."""
        ids = (target.rows, target.blocks, target.offsets)
        rows, blocks, offsets = (torch.from_numpy(each) for each in ids)
        for view, states in zip(self._views[layer], (keys, values), strict=True):
            tokens = states[0].transpose(0, 1)
            chosen = tokens if rows.numel() == tokens.shape[0] else tokens[rows]
            view[blocks, offsets] = chosen.to(view.dtype)

    def view(self, layer: int, blocks: Ids, tokens: int, dtype: torch.dtype) -> LayerViews | None:
        """The first `tokens` tokens of `blocks` without a copy, if they lie in one row (consecutive blocks of
        a layer-outermost pool) and are of `dtype` already. None otherwise."""
        k, v = (_one_row(view, blocks) for view in self._views[layer])
        if k is None or v is None or k.dtype != dtype:
            return None
        return k[:tokens].transpose(0, 1)[None], v[:tokens].transpose(0, 1)[None]

    def read(self, layer: int, visible: Visible, new: LayerViews) -> LayerViews:
        """Gathered copies [1, kv_heads, visible + new tokens, head_dim], in the dtype of `new`.

        Must be called before `write`: the blocks are read as they were before the new tokens.
        """
        k, v = (self._gather(layer, part, visible, new[part]) for part in (0, 1))
        return k, v

    def _gather(self, layer: int, part: int, visible: Visible, new: torch.Tensor) -> torch.Tensor:
        view, new_tokens = self._views[layer][part], new[0].transpose(0, 1)
        block_size = view.shape[1]
        old_tokens = visible.blocks.size * block_size
        buffer = self._buffer(part, old_tokens + new_tokens.shape[0], new_tokens)
        blocks = buffer[:old_tokens].view(-1, *view.shape[1:])
        if len(visible.runs) <= COPIED_RUNS:
            for at, first, count in visible.runs:
                blocks[at : at + count] = view[first : first + count]
        else:
            blocks.copy_(view[torch.from_numpy(visible.blocks)])
        first = self._place_sinks(part, visible, buffer, view)
        end = visible.length + new_tokens.shape[0]
        buffer[visible.length : end] = new_tokens.to(view.dtype)
        return buffer[first:end].transpose(0, 1)[None]

    def _place_sinks(self, part: int, visible: Visible, buffer: torch.Tensor, view: torch.Tensor) -> int:
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
        buffer = self._buffers[part]
        if buffer is None or buffer.shape[0] < tokens or buffer.dtype != like.dtype:
            buffer = like.new_empty((int(tokens * GROWTH), *like.shape[1:]))
            self._buffers[part] = buffer
        return buffer


def _one_row(view: torch.Tensor, blocks: Ids) -> torch.Tensor | None:
    """[tokens, kv_heads, head_dim] from the first of `blocks` on, or None if they lie apart."""
    block_size = view.shape[1]
    adjacent = view.stride(0) == block_size * view.stride(1) and bool((np.diff(blocks) == 1).all())
    if not adjacent or blocks.size == 0:
        return None
    return view.flatten(0, 1)[int(blocks[0]) * block_size :]
