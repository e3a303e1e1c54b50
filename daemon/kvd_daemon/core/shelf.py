"""Published leases, by tenant, pool and key; how many each tenant has there is counted along."""

from collections import Counter
from collections.abc import Iterator, Mapping

from .lease import Lease

Place = tuple[str, str, str]
"""Tenant, pool and key."""


class Shelf(Mapping[Place, Lease]):
    """In the order they were published."""

    def __init__(self) -> None:
        self._leases: dict[Place, Lease] = {}
        self._counts: Counter[str] = Counter()

    def __getitem__(self, place: Place) -> Lease:
        return self._leases[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def count(self, tenant: str) -> int:
        return self._counts[tenant]

    def put(self, place: Place, lease: Lease) -> None:
        """Where nothing is."""
        assert place not in self._leases, "somebody else's place"
        self._leases[place] = lease
        self._counts[place[0]] += 1

    def take(self, place: Place) -> Lease:
        lease = self._leases.pop(place)
        self._counts[place[0]] -= 1
        if not self._counts[place[0]]:
            del self._counts[place[0]]
        return lease
