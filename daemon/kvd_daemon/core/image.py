"""A device's whole state as plain values, and a device from them that decides exactly alike.

Taking an image is one quick pass that shares nothing with the device that will still change; `plain` turns it
into lists, dicts, numbers, bytes and arrays afterwards, in any thread. What follows from other state is left
out and derived again: whose a lease is, fences, promises of guarantees.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from kvd.spec import KVSpec

from .blocks import Blocks
from .device import Device
from .eviction import OrderImage, restored
from .free_runs import FreeRuns, IntArray
from .lease import BlockTable, Lease
from .names import Names, NamesImage, Node
from .parked import Tier
from .pins import Pin
from .pool import Pool, PoolTotals
from .prefix import PrefixIndex
from .quotas import Quotas
from .registry import Registry
from .session import Session

Plain = dict[str, Any]

LEASE_FIELDS = tuple(field.name for field in fields(Lease))
SESSION_FIELDS = tuple(field.name for field in fields(Session) if field.name not in ("leases", "pins"))
PIN_FIELDS = tuple(field.name for field in fields(Pin))
BLOCK_FIELDS = ("state", "generation", "tenant", "holders")
NO_IDS = np.zeros(0, np.int32)
_lease_values = attrgetter(*LEASE_FIELDS)
_session_values = attrgetter(*SESSION_FIELDS)
_pin_values = attrgetter(*PIN_FIELDS)


@dataclass(frozen=True)
class _PoolImage:
    name: str
    pool_id: str
    spec: KVSpec
    totals: Plain
    blocks: list["np.ndarray[Any, Any]"]
    free_starts: list[list[int]]
    free_counts: list[IntArray]
    names: NamesImage
    order: OrderImage
    held: dict[int, int]
    leases: list[int]


@dataclass(frozen=True)
class Image:
    """Taken by `capture`."""

    settings: Plain
    pools: list[_PoolImage]
    sessions: list[tuple[Any, ...]]
    leases: list[tuple[Any, ...]]
    table_sizes: list[int]
    pins: list[tuple[Any, ...]]
    owned: list[list[int]]

    def plain(self) -> Plain:
        """Of values that a journal can write."""
        return {
            **self.settings,
            "pools": [_pool_plain(pool) for pool in self.pools],
            "sessions": _columns(SESSION_FIELDS, self.sessions),
            "leases": _columns(LEASE_FIELDS, [*map(_without_table, self.leases)]),
            "table_sizes": self.table_sizes,
            "tables": self._tables(),
            "pins": _columns(PIN_FIELDS, self.pins),
            "owned": self.owned,
        }

    def _tables(self) -> IntArray:
        """All block tables, one after the other: a table only grows behind what was there."""
        at = LEASE_FIELDS.index("blocks")
        parts = [row[at].ids[:size] for row, size in zip(self.leases, self.table_sizes, strict=True)]
        return np.concatenate(parts) if parts else NO_IDS


def capture(device: Device) -> Image:
    """The state now. Costs a copy of every pool's arrays and a microsecond per lease."""
    registry = device._registry
    quotas = registry.quotas
    return Image(
        settings={
            "memory_bytes": device.memory_bytes,
            "limits": registry.limits,
            "last_lease_id": registry.last_lease_id,
            "last_pin_id": registry.last_pin_id,
            "shelf": [lease.lease_id for lease in registry.shelf.values()],
            "tenants": dict(registry.tenants),
            "moves": list(registry.moves.values()),
            "spills": list(registry.spills.values()),
            "promotions": list(registry.promotions.values()),
            "copy_names": [list(name) for name in registry.copies],
            "copies": list(registry.copies.values()),
            "last_move_id": registry.last_move_id,
            "tiers": {tier.value: arena.budget_bytes for tier, arena in registry.arenas.items()},
            "quotas": {"default": quotas.default, "own": dict(quotas.own), "held": dict(quotas.held)},
        },
        pools=[_pool_image(pool) for pool in registry.pools.values()],
        sessions=[_session_values(session) for session in registry.sessions.values()],
        leases=[_lease_values(lease) for lease in registry.leases.values()],
        table_sizes=[len(lease.blocks) for lease in registry.leases.values()],
        pins=[_pin_values(pin) for pin in registry.pins.values()],
        owned=[list(session.leases) for session in registry.sessions.values()],
    )


def _pool_image(pool: Pool) -> _PoolImage:
    starts, counts = pool.free_runs.layout()
    return _PoolImage(
        name=pool.name,
        pool_id=pool.pool_id,
        spec=pool.spec,
        totals=dict(vars(pool.totals)),
        blocks=[getattr(pool.blocks, name).copy() for name in BLOCK_FIELDS],
        free_starts=starts,
        free_counts=counts,
        names=pool.prefixes.names.image(),
        order=pool.prefixes.order.image(),
        held=dict(pool.holdings.held),
        leases=list(pool.leases),
    )


def _pool_plain(pool: _PoolImage) -> Plain:
    return {
        "name": pool.name,
        "pool_id": pool.pool_id,
        "spec": pool.spec,
        "totals": pool.totals,
        "blocks": dict(zip(BLOCK_FIELDS, pool.blocks, strict=True)),
        "free_starts": [np.array(starts, np.int32) for starts in pool.free_starts],
        "free_counts": pool.free_counts,
        **pool.names.plain(),
        **pool.order.plain(),
        "held": pool.held,
        "leases": pool.leases,
    }


def _without_table(row: tuple[Any, ...]) -> tuple[Any, ...]:
    at = LEASE_FIELDS.index("blocks")
    return (*row[:at], None, *row[at + 1 :])


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Plain:
    """Rows by column: numbers as they are, other values once each, with who has which."""
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return {name: _column(list(values)) for name, values in zip(names, columns, strict=True)}


def _column(values: list[Any]) -> Plain:
    if set(map(type, values)) <= {int}:
        return {"numbers": values}
    places: dict[int, int] = {}
    kept: list[Any] = []
    for value in values:  # by identity: a policy or a name is shared by thousands, comparing costs more
        if id(value) not in places:
            places[id(value)] = len(kept)
            kept.append(value)
    return {"values": kept, "places": [places[id(value)] for value in values]}


def restore(plain: Mapping[str, Any], device: Device) -> None:
    """Make a device that was never used what the image's was. Raises KeyError, TypeError or ValueError if
    the values are not of an image."""
    registry = device._registry
    assert not registry.pools, "a new device"
    assert not registry.sessions, "a new device"
    device.memory_bytes = plain["memory_bytes"]
    registry.last_lease_id = plain["last_lease_id"]
    registry.tenants.update(plain["tenants"])
    _restore_quotas(registry.quotas, plain["quotas"])
    for pool in plain["pools"]:
        registry.pools[pool["name"]] = _restored_pool(registry, pool)
    for row in _rows(plain["sessions"]):
        session = Session(**row)
        registry.sessions[session.session_id] = session
    _restore_leases(registry, plain)
    _restore_pins(registry, plain)


def _restore_quotas(quotas: Quotas, plain: Plain) -> None:
    quotas.default = plain["default"]
    quotas.own = plain["own"]
    quotas.held = plain["held"]


def _restored_pool(registry: Registry, plain: Plain) -> Pool:
    total = plain["blocks"]["state"].size
    pool = Pool(plain["name"], plain["pool_id"], plain["spec"], total - 1, registry.quotas)
    pool.totals = PoolTotals(**plain["totals"])
    pool.leases = set(plain["leases"])
    pool.blocks = Blocks.of(**plain["blocks"])
    pool.free_runs = FreeRuns.of(total, plain["free_starts"], plain["free_counts"])
    columns = (plain["node_tenants"], plain["node_hashes"], plain["node_parents"])
    nodes = [Node(*values) for values in zip(*columns, strict=True)]
    named = dict(zip(plain["node_blocks"], nodes, strict=True))
    pool.prefixes = PrefixIndex(restored(registry.limits.eviction, total, plain), Names.of(total, named))
    pool.holdings.held = plain["held"]
    pool.holdings.promise()
    return pool


def _restore_leases(registry: Registry, plain: Mapping[str, Any]) -> None:
    ends = np.cumsum(np.array(plain["table_sizes"], np.int64)).tolist()
    tables = np.split(plain["tables"], ends[:-1]) if ends else []
    for row, table in zip(_rows(plain["leases"]), tables, strict=True):
        row["blocks"] = BlockTable(table)
        lease = Lease(**row)
        registry.leases[lease.lease_id] = lease
        if lease.session_id in registry.sessions:
            registry.sessions[lease.session_id].leases[lease.lease_id] = lease
    _restore_owners(registry, plain)
    _restore_slots(registry, plain)
    registry.fences.restore(registry.leases.values())


def _restore_owners(registry: Registry, plain: Mapping[str, Any]) -> None:
    """Sessions' leases in the order they came, and the shelf. In an image of version 1 all went by id."""
    for session, lease_ids in zip(registry.sessions.values(), plain.get("owned", []), strict=False):
        session.leases = {lease_id: registry.leases[lease_id] for lease_id in lease_ids}
    for lease in map(registry.leases.__getitem__, plain.get("shelf", [])):
        if lease.shelved is None:
            raise ValueError(f"lease {lease.lease_id} is on no shelf")
        registry.shelf.put((lease.tenant, lease.pool, lease.shelved.key), lease)


def _restore_slots(registry: Registry, plain: Mapping[str, Any]) -> None:
    """Which slots are in use follows from the leases. An image of version 2 has none."""
    for tier, budget_bytes in plain.get("tiers", {}).items():
        registry.arenas[Tier(tier)].budget_bytes = budget_bytes
    registry.last_move_id = plain.get("last_move_id", 0)
    for move in plain.get("moves", []):
        registry.moves[move.move_id] = move
        registry.arenas[move.tier].claim(registry.pools[move.pool], move.slots)
    for spill in plain.get("spills", []):
        registry.spills[spill.spill_id] = spill
        registry.arenas[Tier.HOST].claim(registry.pools[spill.pool], spill.slots)
    for promotion in plain.get("promotions", []):
        registry.promotions[promotion.promotion_id] = promotion
    for (pool, tenant, prefix_hash), copy in zip(
        plain.get("copy_names", []), plain.get("copies", []), strict=True
    ):
        registry.copies.put((pool, tenant, prefix_hash), copy)
        registry.arenas[copy.tier].claim(registry.pools[pool], np.array([copy.slot], np.int32))
    for lease in registry.leases.values():
        for tier, slots in lease.slots():
            registry.arenas[tier].claim(registry.pool_of(lease), slots)


def _restore_pins(registry: Registry, plain: Mapping[str, Any]) -> None:
    """An image of version 1 has none."""
    registry.last_pin_id = plain.get("last_pin_id", 0)
    for row in _rows(plain.get("pins", {})):
        pin = Pin(**row)
        registry.pins[pin.pin_id] = pin
        if pin.session_id in registry.sessions:
            registry.sessions[pin.session_id].pins[pin.pin_id] = pin


def _rows(columns: Plain) -> Iterable[Plain]:
    values = [_unpacked(column) for column in columns.values()]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def _unpacked(column: Plain) -> list[Any]:
    if "numbers" in column:
        numbers: list[Any] = column["numbers"]
        return numbers
    kept = column["values"]
    return [kept[place] for place in column["places"]]
