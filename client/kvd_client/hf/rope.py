"""Moving rotary keys: a key stored at position j, turned by s positions, is the key of position j + s."""

from dataclasses import dataclass

import torch

from kvd.errors import InvalidArgumentError

ROTATABLE = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # frequencies that do not depend on the length seen so far


@dataclass(frozen=True)
class Rotation:
    """A model's rotary embedding in half-split style: dimension i is paired with i + len(inv_freq).

    inv_freq  [rotated_dim / 2] float64, the model's own (so that YaRN's or llama3's scaling is in it)
    """

    inv_freq: torch.Tensor

    @classmethod
    def of_model(cls, rotary_emb: torch.nn.Module) -> "Rotation":
        """Raises InvalidArgumentError if its frequencies change with the sequence's length."""
        kind = getattr(rotary_emb, "rope_type", "default")
        if kind not in ROTATABLE:
            raise InvalidArgumentError(
                f'rope="cache" with a rope of type {kind!r}, whose frequencies change with the length; '
                f'use rope="original"'
            )
        inv_freq = rotary_emb.inv_freq
        assert isinstance(inv_freq, torch.Tensor)
        return cls(inv_freq.detach().to("cpu", torch.float64))

    def moved(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Keys [tokens, kv_heads, head_dim] as if stored `shift` positions later, in their own dtype.

        Tables and products are float64: always from the stored key, so that no error adds up.
        """
        half = self.inv_freq.numel()
        angle = shift * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        exact = keys.to(torch.float64)
        first, second, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return turned.to(keys.dtype)
