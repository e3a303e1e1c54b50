"""Lease, extend, seal and release: the core decides at once; what needs zeroing answers later."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvd.errors import KernelWorkerUnavailableError
from kvd_daemon.core import Change, Extended, Granted, Lease, LeaseWish, Progress, runs_of
from kvd_daemon.core.lease import Scrubbing
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import Scrub

from .admission import Admission, Asker
from .revocations import Revocations
from .sessions import OpenSession
from .undoing import undone_unless_done

SCRUB_ATTEMPTS = 3  # kernel workers that may die over one scrub before the call is undone

Answer = TypeVar("Answer")


class Leases:
    """A device's leases."""

    def __init__(
        self,
        device: RecordingDevice,
        kernel: KernelClient,
        admission: Admission,
        revocations: Revocations,
    ) -> None:
        self._device = device
        self._kernel = kernel
        self._admission = admission
        self._revocations = revocations

    def lease(self, asker: Asker, pool: str, wishes: Sequence[LeaseWish]) -> Granted:
        """Raises what Device.lease does, also where others come first."""
        asked = asker.session_id, pool, wishes, time.monotonic_ns()
        return self._admission.take(
            asker, lambda: [self._device.need_of_lease(*asked)], lambda: self._device.lease(*asked)
        )

    def extend(self, asker: Asker, items: Sequence[tuple[Progress, int]]) -> Extended:
        """Raises what Device.extend does, also where others come first."""
        asked = asker.session_id, items, time.monotonic_ns()
        return self._admission.take(
            asker, lambda: self._device.needs_of_extend(*asked), lambda: self._device.extend(*asked)
        )

    def seal(self, opened: OpenSession, progress: Progress, hashes: Sequence[bytes]) -> Change:
        """Raises what Device.seal does."""
        return self._device.seal(opened.session_id, progress, hashes)

    def release_blocks(self, opened: OpenSession, progress: Progress, block_ids: Sequence[int]) -> Change:
        """Raises what Device.release_blocks does."""
        return self._device.release_blocks(opened.session_id, progress, block_ids)

    def rest(self, opened: OpenSession, progress: Progress, floor: int | None) -> Lease:
        """Raises what Device.rest does."""
        return self._device.rest(opened.session_id, progress, floor)

    def wake(self, opened: OpenSession, lease_id: int) -> Lease:
        """Raises what Device.wake does."""
        return self._device.wake(opened.session_id, lease_id)

    def release(self, opened: OpenSession, lease_ids: Sequence[int]) -> None:
        """Raises what Device.release does."""
        self._device.release(opened.session_id, lease_ids)

    async def scrub(self, leases: Sequence[Lease], conclude: Callable[[], Answer]) -> Answer:
        """Zero what held another tenant's bytes and copy shared tails, or undo the call.

        Answers what `conclude` does; it is called in the batch of the event that ends this. Raises
        KernelWorkerUnavailableError.
        """
        lease_ids = [lease.lease_id for lease in leases]
        with self._revocations.after_job():
            with undone_unless_done(lambda _: self._device.scrub_failed(lease_ids)):
                for lease in leases:
                    await self._scrub_lease(lease)
            with self._device.batch():
                self._device.scrubbed(lease_ids)
                return conclude()

    async def _scrub_lease(self, lease: Lease) -> None:
        assert isinstance(lease.job, Scrubbing), "every lease of the call is busy until scrubbed"
        if not lease.job.foreign.size and lease.job.copy is None:
            return
        runs = np.array(runs_of(np.sort(lease.job.foreign)), np.int32).reshape(-1, 2)
        copies = np.array([] if lease.job.copy is None else lease.job.copy, np.int32).reshape(-1, 2)
        job = Scrub(self._device.pools[lease.pool].pool_id, runs, copies)
        for _ in range(SCRUB_ATTEMPTS):
            try:
                await self._kernel.perform(job)
                return
            except KernelDiedError:
                continue  # zeroing and copying again does no harm
        raise KernelWorkerUnavailableError(
            "kernel workers died while blocks were zeroed or copied; nothing was leased"
        )
