"""Which cached blocks have copies, and where: on each tier the least recently used copy comes first."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from .parked import Copy, Name, Tier


class Copies(Mapping[Name, Copy]):
    """By name; each is in one place. How many there are of a pool is counted along."""

    def __init__(self) -> None:
        self._on: dict[Tier, dict[Name, Copy]] = {tier: {} for tier in Tier}
        self._counts: Counter[tuple[Tier, str]] = Counter()

    def __getitem__(self, name: Name) -> Copy:
        for there in self._on.values():
            if name in there:
                return there[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[Name]:
        for there in self._on.values():
            yield from there

    def __len__(self) -> int:
        return sum(map(len, self._on.values()))

    def on(self, tier: Tier) -> Mapping[Name, Copy]:
        """The least recently used one first."""
        return self._on[tier]

    def count(self, tier: Tier, pool: str) -> int:
        return self._counts[tier, pool]

    def put(self, name: Name, copy: Copy) -> None:
        """The most recently used one of its tier; it has none elsewhere."""
        self._on[copy.tier][name] = copy
        self._counts[copy.tier, name[0]] += 1

    def pop(self, name: Name) -> Copy:
        copy = self[name]
        del self._on[copy.tier][name]
        self._counts[copy.tier, name[0]] -= 1
        return copy

    def used(self, names: Iterable[Name]) -> None:
        """These are the most recently used ones."""
        for name in names:
            self.put(name, self.pop(name))
