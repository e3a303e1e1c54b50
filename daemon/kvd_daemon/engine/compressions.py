"""Compress and observe: the core plans, the kernel worker does, the core swaps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvd.errors import (
    InvalidArgumentError,
    KernelWorkerUnavailableError,
    KvdError,
    LeaseLostError,
    LeaseSuspendedError,
    PoolExhaustedError,
)
from kvd.policy import Policy
from kvd.spec import DTYPE_BYTES, QUERY_DTYPES
from kvd_daemon.core import Compressed, CompressPlan, Lease, Progress, Unchanged
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import Checksums, Done, FloatArray

from .copying import Copying
from .exhaustion import Exhaustion
from .kernel_jobs import ROPE_STYLES, Given, GivenQueries, compress_job, observe_job
from .revocations import Revocations
from .sessions import OpenSession
from .spilling import Spilling
from .undoing import undone_unless_done

LSE_BYTES = 4  # float32
RETRY_AFTER_NS = 500_000_000  # ns; until another kernel worker is there

NO_CHECKSUMS = np.zeros(0, np.uint32)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Outcome:
    """What a compression did; `compressed` is None if there was nothing to prune."""

    lease: Lease
    compressed: Compressed | None = None
    kernel_ns: int = 0
    mass_retained: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))


class Compressions:
    """A device's compressions and observations."""

    def __init__(
        self,
        device: RecordingDevice,
        kernel: KernelClient,
        exhaustion: Exhaustion,
        revocations: Revocations,
        copying: Copying,
        spilling: Spilling,
    ) -> None:
        self._device = device
        self._kernel = kernel
        self._exhaustion = exhaustion
        self._revocations = revocations
        self._copying = copying
        self._spilling = spilling

    async def compress(
        self,
        opened: OpenSession,
        progress: Progress,
        policy: Policy | None,
        given: Given,
        conclude: Callable[[Outcome], Answer],
    ) -> Answer:
        """What `conclude` makes of the outcome; it is called in the batch of the event that ends the job.

        Raises what Device.begin_compress does, KernelWorkerUnavailableError, LeaseLostError, or, where it was
        parked, LeaseSuspendedError.
        """
        self._check(progress.lease_id, given)
        shape = None if given.queries is None else given.queries.shape
        now_ns = time.monotonic_ns()
        try:
            if given.park:
                await self._spilling.room_for(opened.session_id, progress.lease_id, is_checkpoint=True)
            with self._device.batch():
                plan = self._device.begin_compress(
                    opened.session_id, progress, policy, shape, now_ns, given.park
                )
                if isinstance(plan, Unchanged):
                    return conclude(Outcome(plan.lease))
        except PoolExhaustedError as error:
            raise self._exhaustion.explained(error, opened.session.tenant, now_ns) from error
        with self._revocations.after_job():
            checksums = await self._stow(plan)
            done = await self._carry_out(plan, given, checksums)
            with self._device.batch():
                compressed = self._finish(plan, done, checksums)
                if plan.slots.size:
                    self._spilling.parked(plan.lease.lease_id, is_checkpoint=True)
                return conclude(Outcome(plan.lease, compressed, done.kernel_ns, done.mass_retained))

    async def press(self, lease_id: int, policy: Policy) -> None:
        """Prune a resting lease. Raises what Device.begin_press does, and as `compress` does."""
        plan = self._device.begin_press(lease_id, policy)
        if isinstance(plan, CompressPlan):
            with self._revocations.after_job():
                done = await self._carry_out(plan, Given())
                self._finish(plan, done)

    async def _stow(self, plan: CompressPlan) -> Checksums:
        """The checkpoint, before anything moves."""
        with undone_unless_done(lambda _: self._device.abort_compress(plan.lease.lease_id, lost=False)):
            return await self._copying.stow(plan.lease.pool, plan.source, plan.slots)

    async def _carry_out(self, plan: CompressPlan, given: Given, checksums: Checksums = NO_CHECKSUMS) -> Done:
        lease_id = plan.lease.lease_id

        def undo(failure: BaseException) -> None:
            lost = plan.in_place and _may_have_moved(failure)
            self._device.abort_compress(lease_id, lost, checksums.tolist() if lost else ())
            if lost and checksums.size:
                self._spilling.parked(lease_id, is_checkpoint=False)

        try:
            with undone_unless_done(undo):
                return await self._kernel.perform(compress_job(self._device, plan, given))
        except KernelDiedError as death:
            lost = plan.in_place and death.moved
            suspended = lost and checksums.size
            raise (_suspended(lease_id) if suspended else _kernel_died(lease_id, lost)) from death

    def _finish(self, plan: CompressPlan, done: Done, checksums: Checksums = NO_CHECKSUMS) -> Compressed:
        lease_id = plan.lease.lease_id
        kept = done.kept_blocks.tolist() if plan.by_block else done.kept_tokens
        try:
            return self._device.finish_compress(lease_id, kept, checksums.tolist())
        except InvalidArgumentError as error:
            self._device.abort_compress(lease_id, lost=plan.in_place)
            raise AssertionError(f"the kernel worker did not do what was planned: {error}") from error

    async def observe(
        self,
        opened: OpenSession,
        progress: Progress,
        queries: GivenQueries,
        conclude: Callable[[Lease], Answer],
    ) -> Answer:
        """As `compress`. Raises what Device.begin_observe does, KernelWorkerUnavailableError."""
        self._check(progress.lease_id, Given(queries))
        now_ns = time.monotonic_ns()
        plan = self._device.begin_observe(opened.session_id, progress, queries.shape, now_ns)
        with self._revocations.after_job():
            await self._carry_out_observe(plan.lease, queries)
            with self._device.batch():
                return conclude(self._device.finish_observe(plan.lease.lease_id))

    async def _carry_out_observe(self, lease: Lease, queries: GivenQueries) -> None:
        lease_id = lease.lease_id

        def undo(failure: BaseException) -> None:
            self._device.abort_compress(lease_id, lost=_may_have_moved(failure))

        try:
            with undone_unless_done(undo):
                await self._kernel.perform(observe_job(self._device, lease, queries))
        except KernelDiedError as death:
            raise _scores_lost(lease_id) if death.moved else _kernel_died(lease_id, lost=False) from death

    def _check(self, lease_id: int, given: Given) -> None:
        """Raises InvalidArgumentError for what the core cannot see: bytes, dtypes, styles."""
        queries, rope = given.queries, given.rope
        if rope is not None and (rope.style not in ROPE_STYLES or not np.isfinite(rope.inv_freq).all()):
            raise InvalidArgumentError(
                f"rope style {rope.style!r} with {len(rope.inv_freq)} frequencies; one of "
                f"{', '.join(ROPE_STYLES)} and finite frequencies are needed"
            )
        if queries is None:
            return
        if queries.dtype not in QUERY_DTYPES:
            raise InvalidArgumentError(
                f"queries in {queries.dtype!r}; one of {', '.join(QUERY_DTYPES)} is needed"
            )
        if queries.scratch_lease_id == lease_id:
            raise InvalidArgumentError("queries lie in a scratch lease, not in the lease itself")
        scratch = self._device.leases.get(queries.scratch_lease_id)
        if scratch is not None:  # the core says why not, if it is none
            self._check_size(scratch, queries)

    def _check_size(self, scratch: Lease, queries: GivenQueries) -> None:
        spec = self._device.pools[scratch.pool].spec
        row_bytes = spec.head_dim_k * DTYPE_BYTES[queries.dtype] + LSE_BYTES * queries.has_row_lse
        wanted = spec.layers * queries.tokens * queries.query_heads * row_bytes
        there = len(scratch.blocks) * spec.block_bytes
        if wanted > there:
            raise InvalidArgumentError(
                f"queries of {wanted} bytes in a scratch lease of {there} bytes; lease "
                f"{-(-wanted // spec.block_bytes)} blocks for them"
            )


def _may_have_moved(failure: BaseException) -> bool:
    """Whether bytes of the lease may have changed, when that broke its job off."""
    if isinstance(failure, KernelDiedError):
        return failure.moved
    return not isinstance(failure, KvdError)  # which tells that the worker did nothing


def _kernel_died(lease_id: int, lost: bool) -> KvdError:
    if lost:
        return LeaseLostError(
            f"a kernel worker died while it changed lease {lease_id}; release it and prefill again",
            lease_id=lease_id,
        )
    return KernelWorkerUnavailableError(
        f"the kernel worker died; lease {lease_id} is as it was, retry after 500 ms",
        retry_after_ns=RETRY_AFTER_NS,
        lease_id=lease_id,
    )


def _suspended(lease_id: int) -> KvdError:
    return LeaseSuspendedError(
        f"a kernel worker died while it changed lease {lease_id}, which is suspended with all that it held "
        "before: resume it, and compress it again",
        lease_id=lease_id,
    )


def _scores_lost(lease_id: int) -> KvdError:
    return KernelWorkerUnavailableError(
        f"the kernel worker died while it added to the scores of lease {lease_id}, which start anew; "
        "its tokens are as they were: observe all of them again, or compress with window queries",
        retry_after_ns=RETRY_AFTER_NS,
        lease_id=lease_id,
    )
