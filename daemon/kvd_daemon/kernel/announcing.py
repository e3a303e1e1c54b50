"""A backend that says so before the first byte of a lease moves."""

from collections.abc import Callable

from kvd_cuda.backend import Backend, BlockRanks, TokenSelection
from kvd_cuda.dtypes import IntArray
from kvd_cuda.plan import CompressPlan, Rope
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries


class AnnouncingBackend(Backend):
    """Implements `kvd_cuda.backend.Backend` by another one."""

    def __init__(self, backend: Backend, announce: Callable[[], None]) -> None:
        self._backend = backend
        self._announce = announce

    def top_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """See Backend."""
        return self._backend.top_tokens(planes, plan, queries)

    def rank_blocks(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> BlockRanks:
        """See Backend."""
        return self._backend.rank_blocks(planes, plan, queries)

    def heavy_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """See Backend."""
        return self._backend.heavy_tokens(planes, plan, recent)

    def distinct_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """See Backend."""
        return self._backend.distinct_tokens(planes, plan, recent)

    def expected_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """See Backend."""
        return self._backend.expected_tokens(planes, plan, queries)

    def observe(self, planes: KVPlanes, queries: WindowQueries) -> None:
        """See Backend."""
        self._announce()
        self._backend.observe(planes, queries)

    def compact(self, planes: KVPlanes, kept: IntArray, destination: IntArray) -> None:
        """See Backend."""
        self._announce()
        self._backend.compact(planes, kept, destination)

    def rotate_keys(self, planes: KVPlanes, slots: IntArray, delta: int, rope: Rope) -> None:
        """See Backend."""
        self._announce()
        self._backend.rotate_keys(planes, slots, delta, rope)
