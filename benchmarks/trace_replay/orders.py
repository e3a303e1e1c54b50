"""How much of a trace each eviction order of kvd finds again: its own index and orders, without a daemon."""

from collections.abc import Sequence

import numpy as np

from kvd_daemon.core.eviction import ORDERS
from kvd_daemon.core.names import Node
from kvd_daemon.core.prefix import ROOT, PrefixIndex

from .requests import Request

CAPACITIES = (1_000, 5_000, 10_000, 20_000, 50_000)  # blocks of the trace
TENANT = 1


class Cache:
    """A prefix cache of `capacity` blocks. A request's blocks are held while it is served, then cached."""

    def __init__(self, capacity: int, order: str) -> None:
        self._index = PrefixIndex(ORDERS[order](capacity + 1))
        self._free = list(range(capacity, 0, -1))

    def serve(self, request: Request) -> int:
        """Answers how many leading blocks were there."""
        index, names = self._index, [block.to_bytes(32, "big") for block in request.blocks]
        table = index.find_leading(TENANT, names)
        found = len(table)
        index.uncache(table)
        index.used(np.array(table, np.int32))
        missing = len(names) - found - len(self._free)
        if missing > 0:
            self._free += index.evict(missing)
        for parent, name in zip([ROOT, *names][found:], names[found:], strict=False):
            table.append(self._free.pop())
            index.add(table[-1], Node(TENANT, name, parent))
        index.cache(table)
        return found


def found_blocks(requests: Sequence[Request], capacity: int, order: str) -> int:
    """Of all requests together."""
    cache = Cache(capacity, order)
    return sum(cache.serve(request) for request in requests)
