"""Suspend and resume: the core plans, the kernel worker copies, the core swaps."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvd.errors import KernelWorkerUnavailableError, KvdError, LeaseLostError
from kvd_daemon.core import FetchPlan, Lease, Pool, Progress, StowPlan, Tier
from kvd_daemon.core.tiers import Arena, slot_bytes
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import Checksums, Done, Fetch, Request, Stow

from .admission import Admission, Asker
from .arenas import Arenas
from .revocations import Revocations
from .sessions import OpenSession

COPY_ATTEMPTS = 3  # kernel workers that may die over one copy before the call is undone
RETRY_AFTER_NS = 500_000_000  # ns; until another kernel worker is there

Answer = TypeVar("Answer")


class Parking:
    """What a device has parked."""

    def __init__(
        self,
        device: RecordingDevice,
        kernel: KernelClient,
        arenas: Arenas,
        admission: Admission,
        revocations: Revocations,
    ) -> None:
        self._device = device
        self._kernel = kernel
        self._arenas = arenas
        self._admission = admission
        self._revocations = revocations

    @property
    def host_tier(self) -> Arena:
        return self._device.arenas[Tier.HOST]

    def parked_bytes(self, pool: Pool) -> int:
        """Of the host tier, that leases of that pool take."""
        return len(self.host_tier.used_of(pool.name)) * slot_bytes(pool.spec)

    def set_budget(self, host_bytes: int) -> None:
        """What may be parked from now on."""
        if self.host_tier.budget_bytes != host_bytes:
            self._device.set_tiers(host_bytes)

    async def suspend(
        self, opened: OpenSession, progress: Progress, conclude: Callable[[Lease], Answer]
    ) -> Answer:
        """What `conclude` makes of the suspended lease, called in the batch of the event that ends this.

        Raises what Device.begin_suspend does, KernelWorkerUnavailableError; then the lease is as it was.
        """
        plan = self._device.begin_suspend(opened.session_id, progress, time.monotonic_ns())
        with self._revocations.after_job():
            checksums = await self._stow(plan)
            with self._device.batch():
                return conclude(self._device.finish_suspend(plan.lease.lease_id, checksums.tolist()))

    async def _stow(self, plan: StowPlan) -> Checksums:
        pool = self._device.pools[plan.lease.pool]
        try:
            done = await self._copy(pool, Stow(pool.pool_id, plan.source, plan.slots), plan.slots.size)
        except KvdError:
            self._device.abort_suspend(plan.lease.lease_id)
            raise
        return done.checksums

    def resume(self, asker: Asker, lease_id: int, generation: int) -> FetchPlan:
        """Raises what Device.begin_resume does, also where others come first."""
        asked = asker.session_id, lease_id, generation, time.monotonic_ns()
        return self._admission.take(
            asker,
            lambda: self._device.needs_of_resume(*asked),
            lambda: self._device.begin_resume(*asked),
        )

    async def fetched(self, plan: FetchPlan, conclude: Callable[[Lease], Answer]) -> Answer:
        """What `conclude` makes of the lease once its bytes are in its blocks, as of `suspend`.

        Raises KernelWorkerUnavailableError (it is suspended still), LeaseLostError.
        """
        with self._revocations.after_job():
            await self._fetch(plan)
            with self._device.batch():
                return conclude(self._device.finish_fetch(plan.lease.lease_id))

    async def _fetch(self, plan: FetchPlan) -> None:
        pool, parked, lease_id = self._device.pools[plan.lease.pool], plan.parked, plan.lease.lease_id
        job = Fetch(pool.pool_id, parked.slots, plan.destination, parked.checksums)
        try:
            done = await self._copy(pool, job, parked.slots.size)
        except KvdError:
            self._device.abort_fetch(lease_id, lost=False)
            raise
        if done.damaged.size:
            self._device.abort_fetch(lease_id, lost=True)
            raise LeaseLostError(
                f"what was parked of lease {lease_id} is damaged ({done.damaged.size} of {parked.slots.size} "
                "blocks); release it and prefill again",
                lease_id=lease_id,
            )

    async def _copy(self, pool: Pool, job: Request, count: int) -> Done:
        """Copying again does no harm. Raises KernelWorkerUnavailableError, DeviceUnavailableError."""
        if not count:
            return Done()
        with self._arenas.lent(pool) as arena:
            for _ in range(COPY_ATTEMPTS):
                try:
                    return await self._kernel.perform(job, fds=[arena])
                except KernelDiedError:
                    continue
        raise KernelWorkerUnavailableError(
            "kernel workers died while a lease was copied; it is as it was, retry after 500 ms",
            retry_after_ns=RETRY_AFTER_NS,
        )
