"""The queries that vote in a compression, taken from the model's attention while it runs."""

import torch


class Queries:
    """Per layer the queries of the sequence's newest tokens: the last `window`, or all until taken (None).

    Rows are [query_heads, head_dim], after the rotary embedding, in the model's dtype.
    """

    def __init__(self, layers: int, window: int | None) -> None:
        self._window = window
        self._rows: list[torch.Tensor | None] = [None] * layers
        self._new: dict[int, torch.Tensor] = {}

    @property
    def count(self) -> int:
        """Tokens whose queries are here."""
        return 0 if self._rows[0] is None else self._rows[0].shape[0]

    def begin(self) -> None:
        """A forward pass begins: what one that broke off left behind is dropped."""
        self._new.clear()

    def add(self, layer: int, query: torch.Tensor) -> None:
        """A layer's queries [query_heads, new tokens, head_dim] in this forward pass."""
        rows = query.detach().transpose(0, 1)
        self._new[layer] = rows[-self._window :].clone() if self._window else rows

    def settle(self) -> None:
        """The forward pass has ended: its tokens follow those seen before."""
        assert len(self._new) == len(self._rows), "queries of every layer"
        for layer, new in self._new.items():
            older = self._rows[layer]
            rows = new if older is None else torch.cat((older, new))
            self._rows[layer] = rows[-self._window :] if self._window else rows
        self._new.clear()

    def oldest(self, tokens: int) -> torch.Tensor:
        """The oldest `tokens` of them, or as many as there are: [layers, tokens, query_heads, head_dim]."""
        return torch.stack([row[:tokens] for row in self._rows if row is not None])

    def drop_oldest(self, tokens: int) -> None:
        """They have been used."""
        self._rows = [None if row is None else row[tokens:] for row in self._rows]
