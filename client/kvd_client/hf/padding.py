"""What a forward pass's attention_mask says of a batch of leases: which columns are tokens, who sees whom."""

from typing import Any

import numpy as np
import torch

from kvd.errors import InvalidArgumentError
from kvd_client.hf.batch import LeasedBatch
from kvd_client.hf.plan import Bools


class Padding:
    """The mask [rows, columns fed before and now] of one forward pass over `batch`, or none: no padding.

    Raises InvalidArgumentError for a mask of more dimensions over a batch: what is padding is not said there.
    """

    def __init__(self, batch: LeasedBatch, attention_mask: Any) -> None:
        self._batch = batch
        self._mask: Bools | None = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            self._mask = attention_mask.detach().to("cpu", torch.bool).numpy()
        elif attention_mask is not None and len(batch.rows) > 1:
            raise InvalidArgumentError("an attention_mask [rows, columns] is needed for a batch of leases")

    def new_tokens(self, new_columns: int) -> Bools:
        """[rows, new columns]: which of them are tokens. Raises InvalidArgumentError if the mask does not fit
        what the leases hold."""
        rows, columns = len(self._batch.rows), self._batch.columns
        if self._mask is None:
            self._check(np.ones((rows, columns), np.bool_))
            return np.ones((rows, new_columns), np.bool_)
        if self._mask.shape[0] != rows:
            raise InvalidArgumentError(
                f"attention_mask of {self._mask.shape[0]} rows for {rows} leases; a lease holds one sequence "
                f"each: KvdCache([lease, ...])"
            )
        wanted = (rows, columns + new_columns)
        if self._mask.shape != wanted:
            raise InvalidArgumentError(
                f"attention_mask of shape {list(self._mask.shape)}; {list(wanted)} is needed: all columns "
                f"fed so far, and the new ones"
            )
        self._check(self._mask[:, :columns])
        return self._mask[:, columns:]

    def _check(self, old: Bools) -> None:
        """`old` [rows, columns] is what the mask says about columns that were fed before."""
        whole = self._batch.is_whole
        for row, mask in zip(self._batch.rows, old, strict=True):
            if mask[: row.pads].any() if whole else mask.sum() != row.lease.position:
                raise InvalidArgumentError(
                    f"attention_mask shows {int(mask.sum())} tokens before these; lease "
                    f"{row.lease.lease_id} has seen {row.lease.position}: what was padding stays "
                    f"padding, and once tokens are dropped no others can be hidden"
                )

    def mask(self, new_columns: int) -> torch.Tensor | None:
        """The batch's own mask [rows, 1, new columns, keys]; None where transformers' one is right:
        columns are where it thinks they are, or every row fills the width."""
        is_token = self.new_tokens(new_columns)
        if self._batch.is_whole:
            return None
        fills = self._batch.fills_width() and is_token.all()
        if fills and (new_columns == 1 or not self._batch.streams):
            return None
        return self._batch.mask(is_token)
