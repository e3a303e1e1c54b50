"""Operators set quotas; what that means for a call, worked out from who has which block."""

from dataclasses import dataclass

from hypothesis.stateful import rule

from kvd import errors as e
from kvd_daemon.core import Quota

from .driver import Chance, Driver, Refusal, anything
from .world import World

TENANTS = ("red", "blue", "nobody yet")


@dataclass(frozen=True)
class Shortage:
    """Blocks a tenant asks a pool for, against what it holds and what others are promised."""

    world: World
    tenant: str
    pool: str
    ordinary: int = 0
    scratch: int = 0
    woken: int = 0
    returned: int = 0

    @property
    def error(self) -> Refusal:
        if self.is_over_maximum():
            return e.QuotaExceededError
        return e.PoolExhaustedError if self.lacks_room() else None

    def is_over_maximum(self) -> bool:
        limit = self.world.quotas.get(self.tenant, self.world.default_quota).max_blocks
        if self.ordinary == self.woken == 0:
            limit += self.world.pools[self.pool].reserve
        taken = self.ordinary + self.scratch + self.woken - self.returned
        held = sum(len(self.world.held(name, self.tenant)) for name in self.world.pools)
        return taken > 0 and held + taken > limit

    def lacks_room(self) -> bool:
        """Without a look at the maximum: a compression gives back more than it takes."""
        usable, wanted = self.world.usable(self.pool), self.ordinary + self.scratch
        if self.woken + wanted <= self.owed(self.tenant):
            return self.woken + wanted > usable
        left = usable - self.woken - sum(map(self.owed, set(self.world.quotas) - {self.tenant}))
        reserve = self.world.pools[self.pool].reserve if self.ordinary or self.woken else 0
        return wanted > left or self.ordinary > left - reserve

    def owed(self, tenant: str) -> int:
        pool = self.world.pools[self.pool]
        promises = {name: quota.guaranteed_blocks for name, quota in self.world.quotas.items()}
        room, promised = pool.blocks - pool.reserve, promises.get(tenant, 0)
        if sum(promises.values()) > room:
            promised = promised * room // sum(promises.values())
        return max(0, promised - len(self.world.held(self.pool, tenant)))


class QuotaRules(Driver):
    """set_quotas, mostly so that calls still succeed."""

    @rule(chance=anything)
    def set_quotas(self, chance: Chance) -> None:
        own = {tenant: a_quota(chance, 20) for tenant in TENANTS if chance.random() < 0.3}
        default = a_quota(chance, 1 if chance.random() < 0.05 else 0)
        error = e.InvalidArgumentError if default.guaranteed_blocks else None
        self.ask(error, lambda: self.device.set_quotas(own, default))
        if error is None:
            self.world.quotas, self.world.default_quota = own, default


def a_quota(chance: Chance, guaranteed: int) -> Quota:
    most = chance.choice([10, 30, 60, 60, 1 << 40])
    parked = chance.choice([0, 10, 30, 1 << 40])
    return Quota(chance.randint(0, min(guaranteed, most)), most, chance.randint(0, 5), parked)
