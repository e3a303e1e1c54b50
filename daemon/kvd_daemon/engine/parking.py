"""Suspend, resume and restore: the core plans, the kernel worker copies, the core swaps."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvd.errors import CheckpointLostError, LeaseLostError
from kvd_daemon.core import Fetched, FetchPlan, Lease, Pool, Progress, Tier
from kvd_daemon.core.tiers import Arena, slot_bytes
from kvd_daemon.journal import RecordingDevice

from .admission import Admission, Asker
from .copying import Copying
from .revocations import Revocations
from .sessions import OpenSession
from .spilling import Spilling
from .undoing import undone_unless_done

Answer = TypeVar("Answer")


class Parking:
    """What a device has parked."""

    def __init__(
        self,
        device: RecordingDevice,
        copying: Copying,
        admission: Admission,
        revocations: Revocations,
        spilling: Spilling,
    ) -> None:
        self._device = device
        self._copying = copying
        self._admission = admission
        self._revocations = revocations
        self._spilling = spilling

    @property
    def host_tier(self) -> Arena:
        return self._device.arenas[Tier.HOST]

    def parked_bytes(self, pool: Pool) -> int:
        """Of the host tier, that leases of that pool take."""
        return len(self.host_tier.used_of(pool.name)) * slot_bytes(pool.spec)

    @property
    def disk_tier(self) -> Arena:
        return self._device.arenas[Tier.DISK]

    def spilled_bytes(self, pool: Pool) -> int:
        """As `parked_bytes`, of the disk tier."""
        return len(self.disk_tier.used_of(pool.name)) * slot_bytes(pool.spec)

    def set_budgets(self, host_bytes: int, disk_bytes: int) -> None:
        """What may be parked from now on."""
        if (self.host_tier.budget_bytes, self.disk_tier.budget_bytes) != (host_bytes, disk_bytes):
            self._device.set_tiers(host_bytes, disk_bytes)

    async def suspend(
        self, opened: OpenSession, progress: Progress, conclude: Callable[[Lease], Answer]
    ) -> Answer:
        """What `conclude` makes of the suspended lease, called in the batch of the event that ends this.

        Raises what Device.begin_suspend does, KernelWorkerUnavailableError; then the lease is as it was.
        """
        await self._spilling.room_for(opened.session_id, progress.lease_id)
        plan = self._device.begin_suspend(opened.session_id, progress, time.monotonic_ns())
        with self._revocations.after_job():
            with undone_unless_done(lambda _: self._device.abort_suspend(plan.lease.lease_id)):
                checksums = await self._copying.stow(plan.lease.pool, plan.source, plan.slots)
            with self._device.batch():
                suspended = self._device.finish_suspend(plan.lease.lease_id, checksums.tolist())
                self._spilling.parked(suspended.lease_id, is_checkpoint=False)
                return conclude(suspended)

    def resume(self, asker: Asker, lease_id: int, generation: int) -> FetchPlan:
        """Raises what Device.begin_resume does, also where others come first."""
        asked = asker.session_id, lease_id, generation, time.monotonic_ns()
        return self._admission.take(
            asker,
            lambda: self._device.needs_of_resume(*asked),
            lambda: self._device.begin_resume(*asked),
        )

    def restore(self, asker: Asker, progress: Progress) -> FetchPlan:
        """Raises what Device.begin_restore does, also where others come first."""
        asked = asker.session_id, progress, time.monotonic_ns()
        return self._admission.take(
            asker,
            lambda: self._device.needs_of_restore(*asked),
            lambda: self._device.begin_restore(*asked),
        )

    def drop_checkpoint(self, opened: OpenSession, lease_id: int) -> None:
        """Raises what Device.drop_checkpoint does."""
        self._device.drop_checkpoint(opened.session_id, lease_id, time.monotonic_ns())

    async def fetched(self, plan: FetchPlan, conclude: Callable[[Fetched], Answer]) -> Answer:
        """What `conclude` makes of the lease once its bytes are in its blocks, as of `suspend`.

        Raises KernelWorkerUnavailableError (it is as before), LeaseLostError, CheckpointLostError.
        """
        with self._revocations.after_job():
            with undone_unless_done(lambda failure: self._not_fetched(plan, failure)):
                await self._fetch(plan)
            with self._device.batch():
                return conclude(self._device.finish_fetch(plan.lease.lease_id))

    async def _fetch(self, plan: FetchPlan) -> None:
        lease, parked = plan.lease, plan.parked
        damaged = await self._copying.fetch(lease.pool, parked.slots, plan.destination, parked.checksums)
        if damaged:
            blocks = f"{len(damaged)} of {parked.slots.size} blocks"
            is_checkpoint = lease.checkpoint is parked
            raise _checkpoint_lost(lease, blocks) if is_checkpoint else _lease_lost(lease, blocks)

    def _not_fetched(self, plan: FetchPlan, failure: BaseException) -> None:
        lost = isinstance(failure, LeaseLostError | CheckpointLostError)
        self._device.abort_fetch(plan.lease.lease_id, lost)


def _lease_lost(lease: Lease, blocks: str) -> LeaseLostError:
    return LeaseLostError(
        f"what was parked of lease {lease.lease_id} is damaged ({blocks}); release it and prefill again",
        lease_id=lease.lease_id,
    )


def _checkpoint_lost(lease: Lease, blocks: str) -> CheckpointLostError:
    return CheckpointLostError(
        f"the checkpoint of lease {lease.lease_id} is damaged ({blocks}); the lease goes on as it is",
        lease_id=lease.lease_id,
    )
