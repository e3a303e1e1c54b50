"""[tenants.NAME] of kvd.toml: how many blocks a tenant may hold; [tenants."*"] is for all others."""

from collections.abc import Mapping

from kvd.errors import InvalidArgumentError
from kvd_daemon.access.rules import TENANT
from kvd_daemon.unknown_keys import refuse_unknown

OTHERS = "*"
MAX_TENANT_TABLES = 1000  # tables; guarantees are summed over all of them when they change
MAX_QUOTA_BLOCKS = (1 << 32) - 1  # blocks; what the wire shows, and more than all pools of a device have
KEYS = ("guaranteed_blocks", "max_blocks", "pin_blocks", "max_parked_blocks")
MAXIMA = ("max_blocks", "max_parked_blocks")  # without one there is no limit; none is no use

TenantQuotas = Mapping[str, Mapping[str, int]]
"""By tenant, what was set of KEYS; all pools together, but for what is guaranteed: that is in each pool."""


def tenant_quotas_of(table: object) -> TenantQuotas:
    """The [tenants] table of a kvd.toml. Raises InvalidArgumentError."""
    if not isinstance(table, Mapping) or len(table) > MAX_TENANT_TABLES:
        raise InvalidArgumentError(f"tenants: at most {MAX_TENANT_TABLES} tables [tenants.NAME] are needed")
    return {tenant: _quota(tenant, entry) for tenant, entry in table.items()}


def to_table(quotas: TenantQuotas) -> dict[str, dict[str, int]]:
    """As it stands in kvd.toml."""
    return {tenant: dict(quota) for tenant, quota in quotas.items()}


def _quota(tenant: str, entry: object) -> Mapping[str, int]:
    where = f'[tenants."{tenant}"]'
    if tenant != OTHERS and not TENANT.fullmatch(tenant):
        raise InvalidArgumentError(f"{where}: {tenant!r} is no tenant's name")
    if not isinstance(entry, Mapping):
        raise InvalidArgumentError(f"{where} is {entry!r}; a table with {', '.join(KEYS)} is needed")
    refuse_unknown(entry, KEYS, f"key in {where}")
    quota = {key: _blocks(f"{where} {key}", value, int(key in MAXIMA)) for key, value in entry.items()}
    if quota.get("guaranteed_blocks", 0) > quota.get("max_blocks", MAX_QUOTA_BLOCKS):
        raise InvalidArgumentError(
            f"{where}: guaranteed_blocks is above max_blocks; raise the one or lower the other"
        )
    if tenant == OTHERS and quota.get("guaranteed_blocks"):
        raise InvalidArgumentError(f"{where}: guaranteed_blocks needs a tenant's name: [tenants.NAME]")
    return quota


def _blocks(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_QUOTA_BLOCKS:
        raise InvalidArgumentError(
            f"{name} is {value!r}; a number of blocks from {low} to {MAX_QUOTA_BLOCKS} is needed"
        )
    return value
