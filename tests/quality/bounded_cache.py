"""A reference for bounded caches: plain transformers, tensors joined and cut, nothing shared with kvd."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class SinksAndWindowLayer(DynamicLayer):
    """Keeps the first `sinks` tokens and the last `window`; with sinks = 0, the window alone.

    inv_freq [D/2]: the rotary frequencies, to renumber kept tokens 0..sinks+window-1 ("cache" positions).
    Scores only see differences of positions, so the sinks are moved forward, once from the stored keys, by
    the number of dropped tokens. Without it keys stay at their original positions.
    """

    def __init__(self, sinks: int, window: int, inv_freq: Tensor | None = None) -> None:
        super().__init__()
        self.sinks, self.window, self.inv_freq = sinks, window, inv_freq
        self.seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        super().update(key_states, value_states)
        self.seen += key_states.shape[-2]
        self.keys, self.values = self._cut(self.keys), self._cut(self.values)
        dropped = self.seen - self.keys.shape[-2]
        if self.inv_freq is None or dropped == 0:
            return self.keys, self.values
        sinks = rotated(self.keys[..., : self.sinks, :], dropped, self.inv_freq)
        return torch.cat([sinks, self.keys[..., self.sinks :, :]], dim=-2), self.values

    def _cut(self, states: Tensor) -> Tensor:
        if states.shape[-2] <= self.sinks + self.window:
            return states
        return torch.cat([states[..., : self.sinks, :], states[..., -self.window :, :]], dim=-2)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, new: Any) -> tuple[int, int]:
        """(slots, offset) that make the causal rule right: slots count back from the newest token."""
        total = self.seen + (new if isinstance(new, int) else new.shape[0])
        slots = min(total, self.sinks + self.window)
        return slots, total - slots


def rotated(keys: Tensor, positions: int, inv_freq: Tensor) -> Tensor:
    """keys [..., D] that already carry a rotary position, moved forward by `positions`; angles in float64."""
    angles = (positions * inv_freq.double()).repeat(2)
    first, second = keys.double().chunk(2, dim=-1)
    turned = keys.double() * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return turned.to(keys.dtype)


def sinks_and_window(model: Any, sinks: int, window: int, *, cache_positions: bool = False) -> Cache:
    inv_freq = model.model.rotary_emb.inv_freq if cache_positions else None
    layer_count = model.config.num_hidden_layers
    return Cache(layers=[SinksAndWindowLayer(sinks, window, inv_freq) for _ in range(layer_count)])
