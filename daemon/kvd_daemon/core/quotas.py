"""How many blocks a tenant may hold, and how many are kept free for it.

A tenant *holds* the blocks its leases have, in whatever state: a block that several of them share counts
once, a quarantined one counts, a cached one does not. Two promises follow from that:

* its guarantee, in each pool: others leave alone what it would still have to lease to hold so many;
* its maximum, in all pools together: beyond it only the scratch reserve is granted, so that a tenant who is
  there can still compress. Compressing is not counted against it either: it ends with fewer blocks.

What was granted is never taken away: quotas that shrink take effect as blocks come back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvd.errors import InvalidArgumentError, PoolExhaustedError, QuotaExceededError

if TYPE_CHECKING:
    from .pool import Pool
    from .registry import Registry

UNLIMITED = 1 << 40  # blocks; all pools of a device together have at most 2**30


@dataclass(frozen=True)
class Quota:
    """Of one tenant, in blocks. Raises InvalidArgumentError on numbers that make no sense."""

    guaranteed_blocks: int = 0
    max_blocks: int = UNLIMITED
    pin_blocks: int = 0
    max_parked_blocks: int = UNLIMITED

    def __post_init__(self) -> None:
        if min(self.guaranteed_blocks, self.max_blocks, self.pin_blocks, self.max_parked_blocks) < 0:
            raise InvalidArgumentError(f"{self}; numbers of blocks from 0 on are needed")
        if self.guaranteed_blocks > self.max_blocks:
            raise InvalidArgumentError(
                f"{self.guaranteed_blocks} blocks guaranteed to a tenant that may hold {self.max_blocks}; "
                "raise max_blocks or lower guaranteed_blocks"
            )


class Need(NamedTuple):
    """Blocks a call wants: for ordinary leases, for scratch leases, and cached ones it wakes up.

    `returned`: those its tenant gives back for them, once it has them.

    Waking leaves the pool's scratch reserve alone, as ordinary leases do: what is woken nobody can evict.
    """

    ordinary: int = 0
    scratch: int = 0
    woken: int = 0
    returned: int = 0

    @property
    def granted(self) -> int:
        """Blocks that have to be free or evicted."""
        return self.ordinary + self.scratch

    @property
    def taken(self) -> int:
        """Blocks that the tenant will hold more than before, but for `returned`."""
        return self.ordinary + self.scratch + self.woken


class Quotas:
    """What the tenants of a device may hold, and hold in all pools together. Tenants go by their index."""

    def __init__(self) -> None:
        self.default = Quota()
        self.own: dict[int, Quota] = {}
        self.held: dict[int, int] = {}
        self._on_return: Callable[[], None] | None = None

    def of(self, tenant: int) -> Quota:
        return self.own.get(tenant, self.default)

    def are(self, tenants: Mapping[str, int], own: Mapping[str, Quota], default: Quota) -> bool:
        """Whether it has been told that already; `tenants` has their indices."""
        told = {tenants.get(tenant): quota for tenant, quota in own.items()}
        return self.default == default and self.own == told

    def on_return(self, listener: Callable[[], None]) -> None:
        """`listener` is called when blocks come back, in the midst of a change: it must only take note."""
        self._on_return = listener

    def count(self, tenant: int, more: int) -> None:
        """`tenant` holds `more` (or fewer, if negative) blocks."""
        held = self.held.get(tenant, 0) + more
        assert held >= 0, "a tenant gave back more than it held"
        if held:
            self.held[tenant] = held
        else:
            self.held.pop(tenant, None)
        if more < 0 and self._on_return is not None:
            self._on_return()


class Holdings:
    """What each tenant holds in one pool, and what is owed there: guaranteed and not held.

    Guarantees that a pool cannot meet all at once are met in proportion.
    """

    def __init__(self, quotas: Quotas, promisable: int) -> None:
        self._quotas = quotas
        self._promisable = promisable
        self.held: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        self._promised_blocks = 0
        self.owed_blocks = 0
        self.promise()

    def promise(self) -> None:
        """Guarantees changed."""
        wanted = {tenant: quota.guaranteed_blocks for tenant, quota in self._quotas.own.items()}
        total = sum(wanted.values())
        if total > self._promisable:
            wanted = {tenant: blocks * self._promisable // total for tenant, blocks in wanted.items()}
        self._promised = {tenant: blocks for tenant, blocks in wanted.items() if blocks}
        self._promised_blocks = sum(self._promised.values())
        self.owed_blocks = self.recounted_owed()

    def recounted_owed(self) -> int:
        return sum(map(self.owed_to, self._promised))

    def owed_to(self, tenant: int) -> int:
        """What the guarantee of `tenant` still has to yield."""
        if not self._promised:
            return 0
        return max(0, self._promised.get(tenant, 0) - self.held.get(tenant, 0))

    def kept_from(self, tenant: int) -> int:
        """Blocks that are kept free for others than `tenant`."""
        return self.owed_blocks - self.owed_to(tenant)

    def is_within_guarantee(self, tenant: int) -> bool:
        """Whether what `tenant` gives back would be kept free for itself."""
        return self.held.get(tenant, 0) <= self._promised.get(tenant, 0)

    def promised_to(self, tenant: int) -> int:
        return self._promised.get(tenant, 0)

    def promised_to_others(self, tenant: int) -> int:
        return self._promised_blocks - self.promised_to(tenant)

    def count(self, tenant: int, more: int) -> None:
        """`tenant` holds `more` (or fewer, if negative) blocks of this pool."""
        owed = self.owed_to(tenant) if self._promised else 0
        held = self.held.get(tenant, 0) + more
        assert held >= 0, "a tenant gave back more of a pool than it held there"
        if held:
            self.held[tenant] = held
        else:
            self.held.pop(tenant, None)
        if self._promised:
            self.owed_blocks += self.owed_to(tenant) - owed
        self._quotas.count(tenant, more)


def set_quotas(registry: "Registry", own: Mapping[str, Quota], default: Quota) -> None:
    """These from now on, and no others."""
    if default.guaranteed_blocks:
        raise InvalidArgumentError("blocks can be guaranteed only to tenants that are named")
    registry.add_tenants(sorted(own))
    registry.quotas.default = default
    registry.quotas.own = {registry.tenants[tenant]: own[tenant] for tenant in sorted(own)}
    for pool in registry.pools.values():
        pool.holdings.promise()


def require(registry: "Registry", tenant: str, needs: "Sequence[tuple[Pool, Need]]") -> None:
    """Raises QuotaExceededError or PoolExhaustedError if `needs` do not fit now, all of them."""
    index, quotas = registry.tenants[tenant], registry.quotas
    taken = sum([need.ordinary + need.scratch + need.woken - need.returned for _, need in needs])
    beyond = quotas.held.get(index, 0) + taken - quotas.of(index).max_blocks
    if beyond > 0 and taken > 0 and not _fits_reserves(needs, beyond):
        raise quota_exceeded(quotas, registry.tenants, tenant, needs)
    for pool, need in needs:
        require_room(pool, index, need)


def _fits_reserves(needs: "Sequence[tuple[Pool, Need]]", beyond: int) -> bool:
    """Whether it is all for scratch leases, and so many blocks beyond the maximum are in the reserves."""
    scratch = all(need.taken == need.scratch for _, need in needs)
    return scratch and beyond <= sum(pool.reserve for pool, _ in needs)


def require_room(pool: "Pool", tenant: int, need: Need) -> None:
    """Raises PoolExhaustedError if `pool` has too little for `tenant` now, what others are owed kept."""
    holdings, granted = pool.holdings, need.ordinary + need.scratch
    usable, owed = pool.usable - need.woken, holdings.owed_to(tenant)
    if granted + need.woken <= owed and granted <= usable:
        return
    left = usable - (holdings.owed_blocks - owed)
    if granted > left or need.ordinary > left - _reserve(pool, need):
        raise pool_exhausted(pool, tenant, need)


def _reserve(pool: "Pool", need: Need) -> int:
    """Blocks that it must leave to scratch leases."""
    return pool.reserve if need.ordinary or need.woken else 0


def quota_exceeded(
    quotas: Quotas, tenants: Mapping[str, int], tenant: str, needs: "Sequence[tuple[Pool, Need]]"
) -> QuotaExceededError:
    """That `tenant` may not have `needs` now, in numbers; what it gives back for them it does not hold."""
    returned = sum(need.returned for _, need in needs)
    limit, held = quotas.of(tenants[tenant]).max_blocks, quotas.held.get(tenants[tenant], 0) - returned
    wanted = sum(need.taken for _, need in needs)
    return QuotaExceededError(
        f"{wanted} blocks wanted by tenant {tenant}, which may hold {limit} and holds {held}",
        tenant=tenant,
        wanted_blocks=wanted,
        held_blocks=held,
        max_blocks=limit,
        pool=",".join(pool.name for pool, _ in needs),
        **_own(returned),
    )


def pool_exhausted(pool: "Pool", tenant: int, need: Need) -> PoolExhaustedError:
    """That `tenant` cannot have `need` of `pool` now, in numbers. What it gives back is there until then."""
    holdings, usable, reserve = pool.holdings, pool.usable, _reserve(pool, need)
    kept = holdings.kept_from(tenant)
    free = max(0, usable - kept - reserve, min(holdings.owed_to(tenant), usable))
    whole = pool.blocks_total - 1 - reserve - holdings.promised_to_others(tenant) - need.returned
    return PoolExhaustedError(
        f"{need.taken} blocks wanted in pool {pool.name}, {free} free",
        wanted_blocks=need.taken,
        free_blocks=free,
        pool_blocks=max(whole, holdings.promised_to(tenant) - need.returned),
        kept_blocks=kept,
        pool=pool.name,
        **_own(need.returned),
    )


def _own(returned: int) -> dict[str, int]:
    """An error's number of blocks that the lease itself has, if that matters."""
    return {"own_blocks": returned} if returned else {}
