"""The daemon's end of the kernel worker: one job at a time by priority, and a new worker when one dies.

A worker that is silent for longer than its job may be is taken to hang (stopped, spinning, stuck in a system
call): it is killed and replaced like one that died. All that is lost is the job in work.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvd.errors import InvalidArgumentError, KernelWorkerUnavailableError
from kvd.spec import KVSpec
from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel.budgets import START_S, silence_s
from kvd_daemon.kernel.link import COLLECT_S, WorkerCommand, WorkerProcess
from kvd_daemon.kernel.vigil import Vigil

TICK_S = 0.25  # between two looks at the worker
PING_INTERVAL_S = 1.0  # how often an idle worker is asked whether it is there
LATE_S = 4.0  # a worker that is silent for so long does not serve; not yet a reason to kill it
STOPPED_S = 2.0  # a worker stopped by a signal gets so long to be continued, whatever its job may take
UNDEAD_PATIENCE_S = 2.0  # a killed worker is gone in milliseconds, unless a system call cannot be interrupted
MAX_QUEUED_JOBS = 4096  # jobs; the queue of a daemon whose workers all compress at once
FIRST_BACKOFF_S = 0.05  # before the second start; doubled each time
MAX_BACKOFF_S = 5.0  # between starts of a worker that keeps dying
PATIENT_FAILURES = 3  # workers in a row that may die without an answer before jobs are refused at once
RETRY_AFTER_NS = 500_000_000  # ns; a worker starts within a second or three, unless it has to compile
RESTS = "the daemon makes room for the next one"
DROPPED = "the pool was dropped"
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
    spec: KVSpec | None = field(compare=False)  # its pool's, which may be dropped before it ends
    moved: bool = field(compare=False, default=False)


class KernelClient:
    """Takes jobs at any time; `run` sees to it that a worker does them. Tells `on_change` about `trouble`."""

    def __init__(self, command: WorkerCommand, on_change: Callable[[], None]) -> None:
        self._command = command
        self._on_change = on_change
        self._waiting: list[_Job] = []
        self._numbers = itertools.count()
        self._pools: dict[str, tuple[m.MapPool, Sequence[int]]] = {}
        self._worker: WorkerProcess | None = None
        self._vigil: Vigil | None = None
        self._running: _Job | None = None
        self._undead: list[WorkerProcess] = []  # killed, but a system call holds them
        self._failures = 0
        self._serving = False
        self._resting = False
        self._heard_s: float | None = None
        self.restarts = 0
        """Workers that died or were killed."""
        self.trouble: str | None = ""
        """Why no worker serves; empty while the first one starts, None while one serves."""

    @property
    def pid(self) -> int:
        """The worker's process; 0 while there is none."""
        return 0 if self._worker is None else self._worker.pid

    @property
    def _keeps_dying(self) -> str:
        return f"the {self._command.name} keeps dying, the daemon's log says why"

    @property
    def age_s(self) -> float | None:
        """Seconds since a worker last said a word; None before the first one."""
        return None if self._heard_s is None else time.monotonic() - self._heard_s

    def map_pool(self, request: m.MapPool, fds: Sequence[int]) -> None:
        """This worker and every later one maps the pool; the descriptors stay the caller's."""
        self._pools[request.pool_id] = (request, fds)
        if self._serving:
            self._enqueue(request, Priority.PLACES, fds)

    def unmap_pool(self, pool_id: str) -> None:
        """The caller may close the descriptors then. What waits for its turn with that pool is refused."""
        del self._pools[pool_id]
        of_it = [job for job in self._waiting if _pool_of(job.request) == pool_id]
        self._waiting = [job for job in self._waiting if _pool_of(job.request) != pool_id]
        heapq.heapify(self._waiting)
        _refuse(of_it, DROPPED)
        if self._serving and not any(isinstance(job.request, m.MapPool) for job in of_it):
            self._enqueue(m.UnmapPool(pool_id), Priority.PLACES)

    async def perform(
        self, request: m.Request, priority: Priority = Priority.CALLERS, fds: Sequence[int] = ()
    ) -> m.Done:
        """The job's result. The descriptors that come with it stay the caller's, and open until then.

        Raises InvalidArgumentError if the kernels refuse its input, KernelWorkerUnavailableError if it
        was not begun, KernelDiedError if the worker died with it. Whatever it raises, also when it is
        cancelled: no worker has the job any more.
        """
        if self._failures >= PATIENT_FAILURES:
            raise _unavailable(self._keeps_dying)
        if self._resting:
            raise _unavailable(RESTS)
        if (pool_id := _pool_of(request)) and pool_id not in self._pools:
            raise _unavailable(DROPPED)
        if len(self._waiting) >= MAX_QUEUED_JOBS:
            raise _unavailable(f"{MAX_QUEUED_JOBS} jobs wait for the {self._command.name}")
        answer = self._enqueue(request, priority, fds)
        try:
            await asyncio.wait([answer])
        finally:
            await self._let_go(answer)
        return answer.result()

    async def _let_go(self, answer: "asyncio.Future[m.Done]") -> None:
        """Nobody wants it (any more): it is not begun, or it ends."""
        if self._running is None or self._running.answer is not answer:
            answer.cancel()
        while not answer.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([answer])

    async def rest(self, patience_s: float) -> None:
        """Begin no job any more; returns when the one in work has ended, or after that time."""
        self._resting = True
        self._refuse_waiting(RESTS)
        if self._running is not None:
            await asyncio.wait([self._running.answer], timeout=patience_s)

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
        self._undead = [worker for worker in self._undead if not worker.is_collected()]
        try:
            worker = await WorkerProcess.start(self._command, self._received)
        except OSError as error:
            why = f"no {self._command.name} starts: {error.strerror}"
            LOG.error("%s", why)
            return self._worker_ended(why)
        LOG.info("%s %d starts", self._command.name, worker.pid)
        self._worker, self._vigil = worker, Vigil(worker.pid, time.monotonic())
        why, undead = "the daemon stops", False
        try:
            why = f"{await self._watch(worker, self._vigil)}; another one starts"
            LOG.error("%s", why)
            self._serving, self._vigil = False, None  # what it says now may end its job, but begins none
            self._in_trouble(why)
            undead = not await worker.gone_within(UNDEAD_PATIENCE_S)
            if undead:
                LOG.error("%s %d was killed, but a system call holds it", self._command.name, worker.pid)
        finally:
            if not worker.let_go(0.0 if undead else COLLECT_S):
                self._undead.append(worker)
            self.restarts += 1
            self._worker_ended(why)

    async def _watch(self, worker: WorkerProcess, vigil: Vigil) -> str:
        """Until it is gone or has to go; why."""
        called = f"{self._command.name} {worker.pid}"
        while not await worker.ended_within(TICK_S):
            silence_s = vigil.look(time.monotonic())
            if self._serving and self._running is None:
                self._in_trouble(None)
                self._ping()
                continue
            budget_s, over = self._budget()
            if vigil.stopped_s > STOPPED_S:
                return f"{called} was killed: it was stopped over {over}"
            if silence_s > budget_s:
                return f"{called} was killed: silent for {silence_s:.1f} s over {over}"
            if self._serving:
                late = f"{called} is silent for {LATE_S:g} s over {over}"
                self._in_trouble(late if silence_s > LATE_S else None)
        return f"{called} died"

    def _budget(self) -> tuple[float, str]:
        """How long the worker may be silent, and over what."""
        if self._running is None:
            return START_S, "its start"
        request = self._running.request
        return silence_s(request, self._running.spec), f"a {type(request).__name__}"

    def _ping(self) -> None:
        if (self.age_s or 0.0) >= PING_INTERVAL_S:
            self._enqueue(m.Ping(), Priority.ALIVE)

    def _in_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._on_change()

    def _enqueue(
        self, request: m.Request, priority: Priority, fds: Sequence[int] = ()
    ) -> "asyncio.Future[m.Done]":
        answer: asyncio.Future[m.Done] = asyncio.get_running_loop().create_future()
        mapped = self._pools.get(_pool_of(request))
        spec = None if mapped is None else KVSpec(**mapped[0].spec)
        heapq.heappush(self._waiting, _Job(priority, next(self._numbers), request, fds, answer, spec))
        self._begin_next()
        return answer

    def _begin_next(self) -> None:
        while self._waiting and self._waiting[0].answer.done():
            heapq.heappop(self._waiting)  # nobody wants it any more; its pool may be gone
        if not self._serving or self._resting or self._running is not None or not self._waiting:
            return
        job = self._running = heapq.heappop(self._waiting)
        assert self._worker is not None
        assert self._vigil is not None
        self._vigil.heard()
        self._worker.send(job.request, job.fds)

    def _received(self, message: m.Message) -> None:
        if self._vigil is not None:
            self._vigil.heard()
            self._heard_s = time.monotonic()
        match message:
            case m.Ready() if self._vigil is not None:
                self._worker_ready()
            case m.Moving():
                assert self._running is not None
                self._running.moved = True
            case m.Done() | m.Failed():
                self._failures = 0
                self._finish(message)

    def _worker_ready(self) -> None:
        self._serving = True
        for request, fds in self._pools.values():
            self._enqueue(request, Priority.PLACES, fds)
        self._begin_next()
        self._in_trouble(None)

    def _finish(self, outcome: "m.Done | m.Failed | KernelDiedError") -> None:
        job, self._running = self._running, None
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

    def _worker_ended(self, why: str) -> None:
        self._worker = self._vigil = None
        self._failures += 1
        self._serving = False
        if self._running is not None:
            self._finish(KernelDiedError(self._running.moved))
        self._waiting = [job for job in self._waiting if job.priority > Priority.ALIVE]
        heapq.heapify(self._waiting)
        if self._failures >= PATIENT_FAILURES:
            self._refuse_waiting(self._keeps_dying)
        self._in_trouble(why)

    def _refuse_waiting(self, why: str) -> None:
        refused, self._waiting = self._waiting, []
        _refuse(refused, why)


def _pool_of(request: m.Request) -> str:
    """The id of the pool that it is about; empty if it is about none."""
    return getattr(request, "pool_id", "")


def _refuse(jobs: Iterable[_Job], why: str) -> None:
    for job in jobs:
        if not job.answer.done():
            job.answer.set_exception(_unavailable(why))
            job.answer.exception()  # mappings are awaited by nobody


def _unavailable(why: str) -> KernelWorkerUnavailableError:
    return KernelWorkerUnavailableError(f"{why}; retry after 500 ms", retry_after_ns=RETRY_AFTER_NS)
