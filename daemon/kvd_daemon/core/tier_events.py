"""The part of `Device` about what lies in slots of a tier instead of blocks."""

from collections.abc import Mapping, Sequence

from . import copies, fetching, moving, promoting, suspending
from .lease import Lease
from .parked import Copy, CopyMove, Move, Name, Promotion, Spill, Tier
from .pool import Pool
from .quotas import Need
from .registry import Registry
from .results import Fetched, FetchPlan, Progress, StowPlan
from .tiers import Arena


class TierEvents:
    """Base of `Device`, as which it is used."""

    _registry: Registry

    @property
    def arenas(self) -> dict[Tier, Arena]:
        """The tiers."""
        return self._registry.arenas

    def set_tiers(self, host_bytes: int, disk_bytes: int) -> None:
        """How many bytes may be parked from now on; what is parked stays."""
        self._registry.arenas[Tier.HOST].budget_bytes = host_bytes
        self._registry.arenas[Tier.DISK].budget_bytes = disk_bytes

    def begin_move(self, lease_id: int, is_checkpoint: bool, tier: Tier) -> Move:
        """Plan to copy what a lease has parked to another tier; it need not wait. Raises TierFullError."""
        return moving.begin_move(self._registry, lease_id, is_checkpoint, tier)

    def demotable(self) -> bool:
        """Whether `begin_demotion` would find something; changes nothing."""
        return moving.demotable(self._registry)

    def begin_demotion(self, most_bytes: int) -> CopyMove | None:
        """Plan to copy the least recently used copies in host memory to disk; None if there is no room."""
        return moving.begin_demotion(self._registry, most_bytes)

    def recallable(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> list[Name]:
        """Which copies on disk a match of `hashes` waits for; changes nothing. Raises as `match`."""
        session = self._registry.live_session(session_id)
        return moving.to_come(self._registry, session, self._registry.pool(pool), hashes)

    def begin_recall(
        self, session_id: str, pool: str, hashes: Sequence[bytes], most_bytes: int
    ) -> CopyMove | None:
        """Plan to copy the first of them to host memory; None if there is no room. Raises as `match`."""
        session = self._registry.live_session(session_id)
        return moving.begin_recall(self._registry, session, self._registry.pool(pool), hashes, most_bytes)

    def finish_move(self, move_id: int, damaged: Sequence[int]) -> bool:
        """The bytes are there, but for those of damaged slots. False if somebody lost something by that."""
        return moving.finish_move(self._registry, move_id, damaged)

    def abort_move(self, move_id: int) -> None:
        """They are not: all is where it was."""
        moving.abort_move(self._registry, move_id)

    def drop_copies(self, tier: Tier, wanted_bytes: int) -> None:
        """Copies there are dropped, the least recently used first, until so many bytes are free."""
        copies.yield_bytes(self._registry, tier, wanted_bytes)

    def begin_suspend(self, session_id: str, progress: Progress, now_ns: int) -> StowPlan:
        """Plan to park a lease. It is busy, and else as it was, until finished or aborted.

        Raises what `extend` does of a lease, TierFullError, QuotaExceededError (`max_parked_blocks`),
        InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        return suspending.begin_suspend(self._registry, session, progress)

    def finish_suspend(self, lease_id: int, checksums: Sequence[int]) -> Lease:
        """Its slots hold its bytes: the lease is suspended, its blocks go back."""
        return suspending.finish_suspend(self._registry, lease_id, checksums)

    def abort_suspend(self, lease_id: int) -> Lease:
        """They do not: it is as it was."""
        return suspending.abort_suspend(self._registry, lease_id)

    def needs_of_resume(
        self, session_id: str, lease_id: int, generation: int, now_ns: int
    ) -> list[tuple[Pool, Need]]:
        """What `begin_resume` would take now, as `needs_of_extend`."""
        session = self._registry.live_session(session_id, now_ns)
        lease = fetching.suspended(self._registry, session, lease_id, generation)
        return fetching.needs_of(self._registry, lease, lease.parked)

    def begin_resume(self, session_id: str, lease_id: int, generation: int, now_ns: int) -> FetchPlan:
        """Plan to bring a suspended lease back. It is busy until finished or aborted.

        Raises SessionNotFoundError, SessionExpiredError, LeaseNotFoundError, NotOwnerError, LeaseBusyError,
        StaleGenerationError, PoolExhaustedError, QuotaExceededError, what became of the lease,
        InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        return fetching.begin_resume(self._registry, session, lease_id, generation)

    def needs_of_restore(self, session_id: str, progress: Progress, now_ns: int) -> list[tuple[Pool, Need]]:
        """What `begin_restore` would take now, as `needs_of_extend`."""
        session = self._registry.live_session(session_id, now_ns)
        return fetching.needs_of(self._registry, *fetching.restorable(self._registry, session, progress))

    def begin_restore(self, session_id: str, progress: Progress, now_ns: int) -> FetchPlan:
        """Plan to go back to what a lease held before its first compression with `park`.

        Busy until finished or aborted. Raises what `extend` does of a lease, PoolExhaustedError,
        QuotaExceededError, InvalidArgumentError if it has no checkpoint.
        """
        session = self._registry.live_session(session_id, now_ns)
        return fetching.begin_restore(self._registry, session, progress)

    def drop_checkpoint(self, session_id: str, lease_id: int, now_ns: int) -> Lease:
        """A lease goes on without what it could be restored to, if there was such.

        Raises SessionNotFoundError, SessionExpiredError, LeaseNotFoundError, NotOwnerError, LeaseBusyError,
        what became of the lease.
        """
        session = self._registry.live_session(session_id, now_ns)
        return fetching.drop_checkpoint(self._registry, session, lease_id)

    def finish_fetch(self, lease_id: int) -> Fetched:
        """Its blocks hold its bytes: the lease goes on, its slots are free."""
        return fetching.finish_fetch(self._registry, lease_id)

    def abort_fetch(self, lease_id: int, lost: bool) -> Lease:
        """Not lost: it is as before. Lost: what was parked is damaged or gone, so is a suspended lease."""
        return fetching.abort_fetch(self._registry, lease_id, lost)

    def copied_bytes(self, tier: Tier) -> int:
        """What copies of cached blocks take of a tier, and would give for what leases park."""
        return copies.copied_bytes(self._registry, tier)

    def copied_blocks(self, tier: Tier, pool: str) -> int:
        """Copies of that pool's blocks there."""
        return self._registry.copies.count(tier, pool)

    @property
    def copies(self) -> Mapping[Name, Copy]:
        """Of cached blocks, by pool, tenant and hash."""
        return self._registry.copies

    def copyable(self, pool: str) -> bool:
        """Whether `begin_spill` would find something; changes nothing."""
        return copies.copyable(self._registry, self._registry.pool(pool))

    def uncopied(self, pool: str, count: int) -> int:
        """How many cached blocks have no copy, `count` at most; changes nothing."""
        return len(copies.uncopied(self._registry, self._registry.pool(pool), count))

    def begin_spill(self, pool: str, count: int) -> Spill | None:
        """Plan to copy up to `count` cached blocks, which stay as they are; None if there are none."""
        return copies.begin_spill(self._registry, self._registry.pool(pool), count)

    def finish_spill(self, spill_id: int, checksums: Sequence[int]) -> int:
        """The slots hold their bytes, unless they became others meanwhile; how many copies there are more."""
        return copies.finish_spill(self._registry, spill_id, checksums)

    def abort_spill(self, spill_id: int) -> None:
        """They do not."""
        copies.abort_spill(self._registry, spill_id)

    def missing(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> int:
        """How many of `hashes` `begin_promotion` would bring back; changes nothing. Raises as `match`."""
        session = self._registry.live_session(session_id)
        return len(promoting.at_hand(self._registry, session, self._registry.pool(pool), hashes))

    def need_of_promotion(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> tuple[Pool, Need]:
        """What `begin_promotion` would take now; changes nothing. Raises as `match`."""
        session, found = self._registry.live_session(session_id), self._registry.pool(pool)
        return found, promoting.need(self._registry, session, found, hashes)

    def begin_promotion(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> Promotion | None:
        """Plan to bring back those of `hashes` that follow what is in blocks, and have copies in host memory.

        Raises what `match` does, PoolExhaustedError, QuotaExceededError.
        """
        session = self._registry.live_session(session_id)
        return promoting.begin_promotion(self._registry, session, self._registry.pool(pool), hashes)

    def finish_promotion(self, promotion_id: int, damaged: Sequence[int]) -> int:
        """Its blocks hold the bytes, but for those of damaged slots: how many are cached."""
        return promoting.finish_promotion(self._registry, promotion_id, damaged)

    def abort_promotion(self, promotion_id: int) -> None:
        """They do not."""
        promoting.abort_promotion(self._registry, promotion_id)
