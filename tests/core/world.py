"""An independent model of a device: dicts, sets, and memory whose every slot is written and read back.

A token is (tenant, text, position); a text is a number, so that sequences of one text share prefixes.
"""

import copy
import hashlib
from dataclasses import dataclass, field

from kvd import errors as e
from kvd.policy import Policy, Streaming
from kvd_daemon.core import Quota, Tier

from .world_parts import CopyName, Slot, WorldCopyMove, WorldPin, WorldPromotion, WorldSession, WorldShelved

FREE, LEASED, SEALED, CACHED, QUARANTINED = "free", "leased", "sealed", "cached", "quarantined"


def prefix_hash(text: int, depth: int) -> bytes:
    """The chained hash of block `depth` of a text (a text never repeats, so text and depth say all)."""
    return hashlib.sha256(f"{text}:{depth}".encode()).digest()


def hashes(text: int, count: int) -> list[bytes]:
    return [prefix_hash(text, depth) for depth in range(count)]


@dataclass
class WorldPool:
    blocks: int
    block_size: int
    kv_heads: int
    content: dict[int, list] = field(default_factory=dict)
    names: dict[tuple[str, int, int], int] = field(default_factory=dict)

    @property
    def reserve(self) -> int:
        return min(16, self.blocks // 32)

    def read(self, block: int, offset: int) -> object:
        return self.content.get(block, [None] * self.block_size)[offset]

    def write(self, block: int, offset: int, token: object) -> None:
        self.content.setdefault(block, [None] * self.block_size)[offset] = token

    def copy(self, source: int, target: int) -> None:
        self.content[target] = list(self.content.get(source, [None] * self.block_size))

    def zero(self, runs: list[tuple[int, int]]) -> None:
        for start, count in runs:
            for block in range(start, start + count):
                self.content.pop(block, None)


@dataclass
class WorldLease:
    """`slots` holds the position of the token in every slot the worker has written."""

    lease_id: int
    session: str
    pool: str
    tenant: str
    text: int
    policy: Policy
    scratch: bool
    table: list[int]
    slots: list[int]
    position: int
    sealed: int = 0
    compressed: int = 0
    observed: int = 0
    generation: int = 1
    known: tuple[int, int] = (0, 0)
    fate: str = "active"
    busy: bool = False
    ending: str | None = None
    pending: list[int] = field(default_factory=list)
    destination: list[int] = field(default_factory=list)
    shelved: WorldShelved | None = None
    floor: int = 0
    resting_floor: int = 0
    gave: int = 0
    branches: list[tuple[int, int]] = field(default_factory=list)
    copying: tuple[int, int] | None = None
    parked: list[Slot] = field(default_factory=list)
    stowed: list[Slot] = field(default_factory=list)
    checkpoint: list[Slot] = field(default_factory=list)
    back: "WorldLease | None" = None

    def text_at(self, position: int) -> int:
        """Which text the token there is of: a fork goes on with its own, as each of `branches` says."""
        return next((text for start, text in reversed(self.branches) if start <= position), self.text)

    def names(self, count: int, block_size: int) -> list[tuple[str, int, int]]:
        """Of its leading blocks."""
        ends = [(depth + 1) * block_size - 1 for depth in range(count)]
        return [(self.tenant, self.text_at(end), depth) for depth, end in enumerate(ends)]

    @property
    def streams(self) -> bool:
        return isinstance(self.policy, Streaming)

    @property
    def state(self) -> str:
        return "compressing" if self.busy else self.fate


class World:
    """What should be true of the device; the block ids are the device's own choice."""

    def __init__(self) -> None:
        self.now = 0
        self.pools: dict[str, WorldPool] = {}
        self.sessions: dict[str, WorldSession] = {}
        self.leases: dict[int, WorldLease] = {}
        self.lost: dict[int, WorldPool] = {}
        self.pins: dict[int, WorldPin] = {}
        self.quotas: dict[str, Quota] = {}
        self.default_quota = Quota()
        self.tier_bytes = 0
        self.disk_bytes = 0
        self.moves: dict[int, tuple[WorldLease, str, list[Slot], list[Slot], list[int]]] = {}
        self.slots: dict[Slot, list | None] = {}
        self.copies: dict[CopyName, Slot] = {}
        self.copy_moves: dict[int, WorldCopyMove] = {}
        self.spills: dict[int, tuple[str, list[int], list[Slot]]] = {}
        self.promotions: dict[int, WorldPromotion] = {}

    # -- derived ------------------------------------------------------------------------------

    def pool_of(self, lease: WorldLease) -> WorldPool:
        """Also one that is no more: `lost` has those, by lease."""
        return self.lost.get(lease.lease_id) or self.pools[lease.pool]

    def in_use(self, pool: str) -> bool:
        return any(lease.pool == pool and lease.lease_id not in self.lost for lease in self.leases.values())

    def hard_pinned(self, pool: str) -> bool:
        return any(pin.pool == pool and not pin.session for pin in self.pins.values())

    def leases_of(self, session: str) -> list[WorldLease]:
        return [lease for lease in self.leases.values() if lease.session == session]

    def shelf(self) -> dict[tuple[str, str, str], WorldLease]:
        """Published leases by tenant, pool and key."""
        shelved = [lease for lease in self.leases.values() if lease.shelved is not None]
        return {(lease.tenant, lease.pool, lease.shelved.key): lease for lease in shelved}

    def holders(self, pool: str) -> dict[int, set[int]]:
        """Sealed block -> leases whose table has it, by id, and pins, by their negative id.

        Those without a name are there as long as they have holders.
        """
        found: dict[int, set[int]] = {block: set() for block in self.pools[pool].names.values()}
        for lease in self.leases.values():
            if lease.pool == pool:
                for block in lease.table[: lease.sealed] + list(lease.copying or ())[:1]:
                    found.setdefault(block, set()).add(lease.lease_id)
        for pin_id, pin in self.pins.items():
            for block in pin.blocks if pin.pool == pool else []:
                found[block].add(-pin_id)
        return found

    def states(self, pool: str) -> dict[int, str]:
        """Every block's state, from who has it."""
        states = dict.fromkeys(range(1, self.pools[pool].blocks + 1), FREE)
        for block, names in self.holders(pool).items():
            states[block] = SEALED if names else CACHED
        for promotion in self.promotions.values():
            states |= dict.fromkeys(promotion.blocks if promotion.pool == pool else [], LEASED)
        for lease in self.leases.values():
            if lease.pool == pool:
                for block in lease.table[lease.sealed :] + lease.destination:
                    assert states[block] == FREE, f"block {block} has two owners"
                    states[block] = QUARANTINED if lease.fate in ("revoked", "expired") else LEASED
        return states

    def usable(self, pool: str) -> int:
        return sum(state in (FREE, CACHED) for state in self.states(pool).values())

    def held(self, pool: str, tenant: str) -> set[int]:
        """Blocks that leases and pins of the tenant have, alone or together."""
        pins = [pin for pin in self.pins.values() if pin.pool == pool and pin.tenant == tenant]
        promoted = [x for x in self.promotions.values() if x.pool == pool and x.tenant == tenant]
        return {block for held in (*pins, *promoted) for block in held.blocks} | {
            block
            for lease in self.leases.values()
            if lease.pool == pool and lease.tenant == tenant
            for block in lease.table + lease.destination + list(lease.copying or ())
        }

    # -- refusals -----------------------------------------------------------------------------

    def session_error(self, session: str, by_time: bool = True) -> type[e.KvdError] | None:
        found = self.sessions.get(session)
        if found is None:
            return e.SessionNotFoundError
        over = found.state == "expired" or (by_time and self.now >= found.expires)
        return e.SessionExpiredError if over else None

    def lease_error(self, session: str, lease_id: int) -> type[e.KvdError] | None:
        lease = self.leases.get(lease_id)
        if lease is None:
            return e.LeaseNotFoundError
        if lease.session != session:
            return e.NotOwnerError
        return self.fate_error(lease)

    def fate_error(self, lease: WorldLease) -> type[e.KvdError] | None:
        return {
            "active": None,
            "compressing": e.LeaseBusyError,
            "lost": e.LeaseLostError,
            "revoked": e.LeaseRevokedError,
            "expired": e.LeaseExpiredError,
            "shelved": None,
            "resting": e.LeaseRestingError,
            "suspended": e.LeaseSuspendedError,
        }[lease.state]

    # -- what happens -------------------------------------------------------------------------

    def take(self, lease: WorldLease, blocks: list[int]) -> None:
        """The device gave these to the lease: they must have been free, or cached and due."""
        pool = self.pool_of(lease)
        states = self.states(lease.pool)
        evicted = [block for block in blocks if states[block] == CACHED]
        free = sum(state == FREE for state in states.values())
        assert all(states[block] in (FREE, CACHED) for block in blocks), "taken from somebody"
        assert len(evicted) == max(0, len(blocks) - free), "evicted more or less than needed"
        assert len(set(blocks)) == len(blocks)
        for (tenant, text, depth), block in pool.names.items():
            child = pool.names.get((tenant, text, depth + 1))
            if block in evicted and child is not None and child not in evicted:
                assert states[child] != CACHED, "a cached parent went before its cached child"
        pool.names = {name: block for name, block in pool.names.items() if block not in evicted}

    def write(self, lease: WorldLease, positions: list[int]) -> None:
        """The worker writes tokens of its text behind what it has."""
        pool = self.pool_of(lease)
        for position in positions:
            slot = len(lease.slots)
            assert slot >= lease.sealed * pool.block_size, "a shared block is never written"
            block, offset = lease.table[slot // pool.block_size], slot % pool.block_size
            pool.write(block, offset, (lease.tenant, lease.text_at(position), position))
            lease.slots.append(position)
            lease.position = position + 1

    def learn(self, lease: WorldLease) -> None:
        """The device has heard where the lease stands."""
        lease.known = len(lease.slots), lease.position

    def forget(self, lease: WorldLease) -> None:
        self.drop_all_slots(lease)
        del self.leases[lease.lease_id]

    def drop_all_slots(self, lease: WorldLease) -> None:
        self.drop_slots(lease, "parked")
        self.drop_slots(lease, "checkpoint")

    def drop_slots(self, lease: WorldLease, which: str) -> None:
        for slot in getattr(lease, which):
            del self.slots[slot]
        setattr(lease, which, [])

    def lose_parked(self, lease: WorldLease) -> None:
        """What was in the slots of a suspended lease is gone."""
        self.drop_all_slots(lease)
        lease.slots, lease.known, lease.fate = [], (0, lease.known[1]), "lost"
        lease.compressed = lease.observed = 0

    def fence(self, lease: WorldLease, fate: str) -> None:
        self.drop_all_slots(lease)
        lease.table, lease.sealed, lease.fate = lease.table[lease.sealed :], 0, fate

    def job_ended(self, lease: WorldLease) -> None:
        lease.busy, lease.copying = False, None
        if lease.ending == "reclaim":
            self.forget(lease)
        elif lease.ending is not None and lease.fate != "revoked":
            self.fence(lease, {"expire": "expired", "revoke": "revoked"}[lease.ending])
        lease.ending = None

    def end_session(self, session: str) -> tuple[set[int], set[int]]:
        """Answers the ids of the leases that end now, and of those that end with their job."""
        leases = self.leases_of(session)
        for lease in leases:
            if lease.busy:
                lease.ending = "reclaim"
            else:
                self.forget(lease)
        del self.sessions[session]
        self.drop_pins(session)
        busy = {lease.lease_id for lease in leases if lease.busy}
        return {lease.lease_id for lease in leases} - busy, busy

    def drop_pins(self, session: str) -> None:
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin.session != session}
        for lease in list(self.shelf().values()):
            if lease.shelved.to_session == session:
                self.forget(lease)

    def drop_pool(self, name: str) -> WorldPool:
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin.pool != name}
        for lease, _, _, target, _ in self.moves.values():
            if lease.pool == name:
                self.drop_target(target)
        self.forget_copying(name)
        for tier in Tier:
            self.drop_copies(tier, [name])
        return self.pools.pop(name)

    def forget_copying(self, pool: str | None = None) -> None:
        for spill_id, (name, _, slots) in list(self.spills.items()):
            if pool in (None, name):
                self.drop_target(slots)
                del self.spills[spill_id]
        for number, promotion in list(self.promotions.items()):
            if pool in (None, promotion.pool):
                del self.promotions[number]
        for number, move in list(self.copy_moves.items()):
            if pool in (None, move.pool):
                self.drop_target(move.target)
                del self.copy_moves[number]

    def drop_copies(self, tier: Tier, pools: list[str]) -> None:
        for name in [name for name, slot in self.copies.items() if name[0] in pools and slot[0] is tier]:
            del self.slots[self.copies.pop(name)]

    def drop_target(self, target: list[Slot]) -> None:
        """Of a move that came to nothing; once."""
        for slot in target:
            del self.slots[slot]
        target.clear()

    def expire_pins(self) -> set[int]:
        """Answers the ids of those that end now."""
        due = {pin_id for pin_id, pin in self.pins.items() if pin.session and pin.expires <= self.now}
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin_id not in due}
        return due

    def expire(self) -> set[int]:
        """Answers the ids of the leases of sessions that expired now."""
        ids: set[int] = set()
        for name, session in self.sessions.items():
            if session.state == "expired" or self.now < session.expires:
                continue
            session.state = "expired"
            self.drop_pins(name)
            for lease in self.leases_of(name):
                ids.add(lease.lease_id)
                if lease.busy:
                    lease.ending = lease.ending or "expire"
                elif lease.fate != "revoked":
                    self.fence(lease, "expired")
        return ids

    def lose_pool(self, name: str) -> None:
        """Its memory is gone: its leases hold nothing, and say so until they are released."""
        pool = self.drop_pool(name)
        for lease in list(self.leases.values()):
            if lease.shelved is not None and lease.pool == name:
                self.forget(lease)
            elif lease.pool == name and lease.lease_id not in self.lost:
                self.drop_all_slots(lease)
                self.lost[lease.lease_id] = pool
                lease.table, lease.slots, lease.pending = [], [], []
                lease.sealed = lease.compressed = lease.observed = 0
                lease.known = 0, lease.known[1]
                live = ("active", "resting", "suspended")
                lease.fate = "lost" if lease.fate in live else lease.fate

    def restore(self, saved: WorldLease) -> None:
        current = self.leases[saved.lease_id]
        saved.ending, saved.busy = current.ending, current.busy
        self.leases[saved.lease_id] = saved

    def saved(self, lease: WorldLease) -> WorldLease:
        return copy.deepcopy(lease)

    def shares_tail(self, lease: WorldLease) -> bool:
        return lease.sealed * self.pool_of(lease).block_size > len(lease.slots)

    def needs_copy(self, lease: WorldLease) -> bool:
        """To write on, where others have its last block too."""
        return self.shares_tail(lease) and len(self.holders(lease.pool)[lease.table[lease.sealed - 1]]) > 1

    def expected_position(self, lease: WorldLease, slot: int, length: int, position: int) -> int:
        """What ARCHITECTURE.md says about positions that are not written down."""
        block_size = self.pool_of(lease).block_size
        if isinstance(lease.policy, Streaming) and slot < lease.policy.sink_blocks(block_size) * block_size:
            return slot
        return position - (length - slot)
