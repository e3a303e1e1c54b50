"""[pools.NAME] of kvd.toml: which tenants' workers may use a pool. A pool without one is everybody's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.errors import InvalidArgumentError, PermissionDeniedError
from kvd_daemon.unknown_keys import refuse_unknown

from .rules import TENANT

MAX_POOL_RULES = 1000  # tables; far above the pools of a device
MAX_TENANTS_OF_POOL = 1000  # names in one list
KEYS = ("tenants",)


@dataclass(frozen=True)
class PoolTenants:
    """By pool name."""

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def require(self, tenant: str, pool: str) -> None:
        """Raises PermissionDeniedError."""
        allowed = self.allowed.get(pool)
        if allowed is not None and tenant not in allowed:
            raise PermissionDeniedError(
                f"pool {pool!r} is not for tenant {tenant!r}; an operator may allow it in [pools.{pool}]",
                pool=pool,
                tenant=tenant,
            )

    def to_table(self) -> dict[str, dict[str, list[str]]]:
        """As it stands in kvd.toml."""
        return {pool: {"tenants": sorted(tenants)} for pool, tenants in self.allowed.items()}


def pool_tenants_of(table: object) -> PoolTenants:
    """The [pools] table of a kvd.toml. Raises InvalidArgumentError."""
    if not isinstance(table, Mapping) or len(table) > MAX_POOL_RULES:
        raise InvalidArgumentError(f"pools: at most {MAX_POOL_RULES} tables [pools.NAME] are needed")
    return PoolTenants({pool: _tenants(entry, f"[pools.{pool}]") for pool, entry in table.items()})


def _tenants(entry: object, where: str) -> frozenset[str]:
    if not isinstance(entry, Mapping):
        raise InvalidArgumentError(f'{where} is {entry!r}; tenants = ["NAME", ...] is needed in it')
    refuse_unknown(entry, KEYS, f"key in {where}")
    tenants = entry.get("tenants")
    if not isinstance(tenants, list) or not tenants or len(tenants) > MAX_TENANTS_OF_POOL:
        raise InvalidArgumentError(
            f"{where}: tenants is {tenants!r}; a list of 1 to {MAX_TENANTS_OF_POOL} names is needed"
        )
    for tenant in tenants:
        if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
            raise InvalidArgumentError(f"{where}: {tenant!r} is no tenant's name")
    return frozenset(tenants)
