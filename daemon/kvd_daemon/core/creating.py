"""What a new pool must be, and what it must have in common with one of the same name."""

import re

from kvd.errors import (
    DeviceFullError,
    InvalidArgumentError,
    LimitExceededError,
    PoolMismatchError,
    PoolNotFoundError,
)
from kvd.limits import MAX_POOL_NAME_CHARS
from kvd.spec import KVSpec

from .pool import Pool
from .registry import Registry

_POOL_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]+")  # dots alone would name folders in tools' paths


def check_new_pool(registry: Registry, name: str, spec: KVSpec, blocks: int, memory_bytes: int) -> None:
    """Raises InvalidArgumentError, PoolNotFoundError (no `blocks`), LimitExceededError, DeviceFullError."""
    limits = registry.limits
    if len(name) > MAX_POOL_NAME_CHARS or not _POOL_NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"pool name {name[:40]!r}; 1 to {MAX_POOL_NAME_CHARS} of [A-Za-z0-9._-] needed"
        )
    if blocks == 0:
        raise PoolNotFoundError(f"no pool {name!r}; say how many blocks to create it")
    if not 0 < blocks <= limits.blocks_per_pool:
        raise LimitExceededError(f"{blocks} blocks in a pool; 1 to {limits.blocks_per_pool} allowed")
    if len(registry.pools) >= limits.pools:
        raise LimitExceededError(f"{limits.pools} pools are the limit; drop one")
    used = sum(pool.spec.pool_bytes(pool.blocks_total) for pool in registry.pools.values())
    wanted, free = spec.pool_bytes(blocks + 1), memory_bytes - used
    if wanted > free:
        raise DeviceFullError(
            f"{wanted} bytes wanted for {blocks + 1} blocks, {free} of {memory_bytes} left; drop a pool, or "
            f"ask for {max(0, free // spec.block_bytes - 1)} blocks",
            wanted_bytes=wanted,
            free_bytes=free,
        )


def same_spec(pool: Pool, spec: KVSpec) -> Pool:
    """Raises PoolMismatchError naming what differs."""
    fields = pool.spec.differing_fields(spec)
    if fields:
        differences = ", ".join(f"{name} is {mine}, not {theirs}" for name, (mine, theirs) in fields.items())
        raise PoolMismatchError(
            f"pool {pool.name} has another geometry: {differences}; use its spec or another name",
            fields=",".join(fields),
        )
    return pool
