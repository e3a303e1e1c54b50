"""The daemon's end of the kernel worker: one job at a time by priority, and a new worker when one dies."""

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvd.errors import InvalidArgumentError, KernelWorkerUnavailableError
from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel.link import WorkerCommand, WorkerProcess

START_DEADLINE_S = 180.0  # importing torch takes seconds, compiling kernels for the first time half a minute
PING_INTERVAL_S = 1.0  # how often an idle worker is asked whether it is there
PING_DEADLINE_S = 10.0  # a worker that does not answer by then is killed; a loaded machine may take seconds
JOB_DEADLINE_S = 120.0  # the longest sequence takes seconds; a worker beyond it hangs
MAX_QUEUED_JOBS = 4096  # jobs; the queue of a daemon whose workers all compress at once
FIRST_BACKOFF_S = 0.05  # before the second start; doubled each time
MAX_BACKOFF_S = 5.0  # between starts of a worker that keeps dying
PATIENT_FAILURES = 3  # workers in a row that may die without an answer before jobs are refused at once
RETRY_AFTER_NS = 500_000_000  # ns; a worker starts within a second or three, unless it has to compile
LOG = logging.getLogger("kvd.kernel")


class Priority(IntEnum):
    """Lower goes first."""

    PLACES = 0  # which pools there are
    ALIVE = 1
    CALLERS = 2
    POPULATE = 3


class KernelDiedError(Exception):
    """The worker died with the job. `moved`: it had begun to change the lease's own bytes."""

    def __init__(self, moved: bool) -> None:
        super().__init__("the kernel worker died with the job")
        self.moved = moved


@dataclass(order=True)
class _Job:
    priority: Priority
    number: int
    request: m.Request = field(compare=False)
    fds: Sequence[int] = field(compare=False)
    answer: "asyncio.Future[m.Done]" = field(compare=False)
    moved: bool = field(compare=False, default=False)

    @property
    def deadline_s(self) -> float:
        return PING_DEADLINE_S if self.priority is Priority.ALIVE else JOB_DEADLINE_S


class KernelClient:
    """Takes jobs at any time; `run` sees to it that a worker does them. Tells `on_change` about `serving`."""

    def __init__(self, command: WorkerCommand, on_change: Callable[[], None]) -> None:
        self._command = command
        self._on_change = on_change
        self._waiting: list[_Job] = []
        self._numbers = itertools.count()
        self._pools: dict[str, tuple[m.MapPool, Sequence[int]]] = {}
        self._worker: WorkerProcess | None = None
        self._running: _Job | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._failures = 0
        self.serving = False
        """True while a worker runs that has answered."""

    def map_pool(self, request: m.MapPool, fds: Sequence[int]) -> None:
        """This worker and every later one maps the pool; the descriptors stay the caller's."""
        self._pools[request.pool_id] = (request, fds)
        if self.serving:
            self._enqueue(request, Priority.PLACES, fds)

    def unmap_pool(self, pool_id: str) -> None:
        """The caller may close the descriptors then: a mapping that still waits for its turn is forgotten."""
        del self._pools[pool_id]
        for job in self._waiting:
            if isinstance(job.request, m.MapPool) and job.request.pool_id == pool_id:
                job.answer.cancel()
                return
        if self.serving:
            self._enqueue(m.UnmapPool(pool_id), Priority.PLACES)

    async def perform(self, request: m.Request, priority: Priority = Priority.CALLERS) -> m.Done:
        """The job's result.

        Raises InvalidArgumentError if the kernels refuse its input, KernelWorkerUnavailableError if it
        was not begun, KernelDiedError if the worker died with it.
        """
        if self._failures >= PATIENT_FAILURES:
            raise _unavailable("the kernel worker keeps dying, the daemon's log says why")
        if len(self._waiting) >= MAX_QUEUED_JOBS:
            raise _unavailable(f"{MAX_QUEUED_JOBS} jobs wait for the kernel worker")
        return await self._enqueue(request, priority)

    async def run(self) -> None:
        """Start workers, one after the other, until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            started = time.monotonic()
            await self._live_once()
            if time.monotonic() - started > 2 * MAX_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live_once(self) -> None:
        """One worker from its start to its end."""
        try:
            worker = await WorkerProcess.start(self._command, self._received)
        except OSError as error:
            LOG.error("no kernel worker starts: %s", error.strerror)
            return self._worker_ended()
        LOG.info("kernel worker %d starts", worker.pid)
        self._worker = worker
        self._watch_deadline(START_DEADLINE_S)
        try:
            while not worker.ended.is_set():
                try:
                    await asyncio.wait_for(worker.ended.wait(), PING_INTERVAL_S)
                except TimeoutError:
                    self._ping()
            LOG.warning("kernel worker %d is gone", worker.pid)
        finally:
            worker.reap()
            self._worker_ended()

    def _ping(self) -> None:
        if self.serving and self._running is None:
            self._enqueue(m.Ping(), Priority.ALIVE)

    def _enqueue(
        self, request: m.Request, priority: Priority, fds: Sequence[int] = ()
    ) -> "asyncio.Future[m.Done]":
        answer: asyncio.Future[m.Done] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, _Job(priority, next(self._numbers), request, fds, answer))
        self._begin_next()
        return answer

    def _begin_next(self) -> None:
        while self._waiting and self._waiting[0].answer.done():
            heapq.heappop(self._waiting)  # nobody wants it any more; its pool may be gone
        if not self.serving or self._running is not None or not self._waiting:
            return
        job = self._running = heapq.heappop(self._waiting)
        self._watch_deadline(job.deadline_s)
        assert self._worker is not None
        self._worker.send(job.request, job.fds)

    def _received(self, message: m.Message) -> None:
        match message:
            case m.Ready():
                self._worker_ready()
            case m.Moving():
                assert self._running is not None
                self._running.moved = True
            case m.Done() | m.Failed():
                self._failures = 0
                self._finish(message)

    def _worker_ready(self) -> None:
        self._stop_deadline()
        self.serving = True
        for request, fds in self._pools.values():
            self._enqueue(request, Priority.PLACES, fds)
        self._begin_next()
        self._on_change()

    def _finish(self, outcome: "m.Done | m.Failed | KernelDiedError") -> None:
        job, self._running = self._running, None
        self._stop_deadline()
        assert job is not None
        if not job.answer.done():  # done: whoever asked was cancelled
            match outcome:
                case m.Done():
                    job.answer.set_result(outcome)
                case m.Failed(message, caller_mistake=True):
                    job.answer.set_exception(InvalidArgumentError(message))
                case m.Failed(message):
                    job.answer.set_exception(_unavailable(message))
                case KernelDiedError():
                    job.answer.set_exception(outcome)
            job.answer.exception()  # pings and mappings are awaited by nobody
        self._begin_next()

    def _worker_ended(self) -> None:
        self._worker = None
        self._failures += 1
        was_serving, self.serving = self.serving, False
        self._stop_deadline()
        if self._running is not None:
            self._finish(KernelDiedError(self._running.moved))
        self._waiting = [job for job in self._waiting if job.priority > Priority.ALIVE]
        heapq.heapify(self._waiting)
        if self._failures >= PATIENT_FAILURES:
            self._refuse_waiting()
        if was_serving:
            self._on_change()

    def _refuse_waiting(self) -> None:
        refused, self._waiting = self._waiting, []
        for job in refused:
            if not job.answer.done():
                job.answer.set_exception(
                    _unavailable("the kernel worker keeps dying, the daemon's log says why")
                )

    def _watch_deadline(self, deadline_s: float) -> None:
        worker = self._worker
        assert worker is not None
        self._deadline = asyncio.get_running_loop().call_later(deadline_s, self._too_late, worker, deadline_s)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @staticmethod
    def _too_late(worker: WorkerProcess, deadline_s: float) -> None:
        LOG.error("kernel worker %d did not answer within %g s; it is killed", worker.pid, deadline_s)
        worker.kill()


def _unavailable(why: str) -> KernelWorkerUnavailableError:
    return KernelWorkerUnavailableError(f"{why}; retry after 500 ms", retry_after_ns=RETRY_AFTER_NS)
