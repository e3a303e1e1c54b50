"""One lease as a model sees it: a row of a batch, without the padding beside it."""

import numpy as np

from kvd.arguments import refused
from kvd.errors import InvalidArgumentError
from kvd.policy import Streaming
from kvd_client import Lease
from kvd_client.hf.plan import Bools, Ids, Visible, window_visible


class LeasedSequence:
    """`pads` of the model's columns left of the lease's tokens (or between them) have no token in it."""

    def __init__(self, lease: Lease) -> None:
        if not isinstance(lease, Lease):
            raise refused("lease", lease, "a kvd_client.Lease, or a list of them,")
        spec = lease.pool.spec
        if spec.dtype.startswith("float8"):
            raise InvalidArgumentError(
                f"a pool of {spec.dtype} needs scaled keys and values, which transformers does not have; "
                f"use a bfloat16 or float32 pool"
            )
        self.lease = lease
        self.streaming = lease.policy if isinstance(lease.policy, Streaming) else None
        self.pads = 0
        self.pads_are_left = True

    @property
    def columns(self) -> int:
        """Tokens and padding that the model has fed so far."""
        return self.pads + self.lease.position

    def table(self) -> Ids:
        """The lease's block ids."""
        return self.lease.block_table.astype(np.int64)

    def visible(self) -> Visible:
        """What the next forward pass's queries may see of the tokens before it."""
        lease = self.lease
        used = self.table()[: lease.pool.spec.blocks_for(lease.length)]
        everything = Visible(used, lease.length, lease.position)
        return window_visible(everything, self.streaming) if self.streaming else everything

    def add_pads(self, is_token: Bools) -> None:
        """New columns [new] have been fed, whose tokens are not committed yet; the others are padding."""
        new_pads = int((~is_token).sum())
        is_left = self.lease.position == 0 and not is_token[:new_pads].any()
        self.pads_are_left &= new_pads == 0 or bool(is_left)
        self.pads += new_pads

    def seen(self, visible: Visible, is_token: Bools) -> Bools:
        """[new, visible + new]: which keys each new column's query sees."""
        ranks = np.cumsum(is_token) - 1
        queries = (visible.position + ranks)[:, None]
        keys = np.concatenate((visible.positions(), visible.position + ranks))
        stored = np.concatenate((np.ones(visible.count, np.bool_), is_token))
        seen: Bools = (keys <= queries) & stored
        if self.streaming is not None:
            seen &= (keys > queries - self.streaming.window) | (keys < self.streaming.sinks)
        return seen
