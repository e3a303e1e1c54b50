"""The kernel worker's work: one request after the other.

It owns nothing: everything it knows is told by the daemon, so it can be killed at any time and started again.
"""

import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvd.spec import KVSpec
from kvd_cuda.backend import Backend
from kvd_cuda.compress import compress
from kvd_cuda.driver import CudaError
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host import HostBackend
from kvd_cuda.plan import CompressPlan, Rope
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries
from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel import wire
from kvd_daemon.kernel.announcing import AnnouncingBackend
from kvd_daemon.kernel.daemon_link import DaemonGoneError, DaemonLink, Voice
from kvd_daemon.kernel.gpus import Gpus
from kvd_daemon.kernel.mapped_pool import MappedPool
from kvd_daemon.kernel.punching import punch
from kvd_daemon.kernel.slots import fetch, stow
from kvd_daemon.kernel.warm import warm_up

LOG = logging.getLogger("kvd.kernel")


class KernelWorker:
    """Pools by id, and what to do for each message."""

    def __init__(self, link: DaemonLink, voice: Voice, cache: Path) -> None:
        self._link = link
        self._voice = voice
        self._pools: dict[str, MappedPool] = {}
        self._host = HostBackend(on_step=voice.step)
        self._gpus = Gpus(cache, voice.step)

    def _backend(self, pool: MappedPool) -> Backend:
        own: Backend = pool.backend or self._host
        return AnnouncingBackend(own, lambda: self._link.send(m.Moving()))

    def serve(self) -> None:
        """Until the daemon is gone. Anything unforeseen ends this process; the daemon starts another."""
        while True:
            request = self._link.receive()
            started = time.monotonic_ns()
            try:
                done = self._perform(request)
            except KernelInputError as error:
                self._link.send(m.Failed(str(error), caller_mistake=True))
            except OSError as error:
                self._link.send(m.Failed(str(error), caller_mistake=False))
            else:
                self._link.send(replace(done, kernel_ns=time.monotonic_ns() - started))

    def _perform(self, request: m.Message) -> m.Done:
        match request:
            case m.MapPool():
                self._pools[request.pool_id] = self._map(request)
            case m.UnmapPool(pool_id):
                del self._pools[pool_id]
            case m.Populate(pool_id, offset, byte_count):
                self._pools[pool_id].populate(offset, byte_count)
            case m.Scrub(pool_id, runs, copies):
                self._pools[pool_id].scrub(runs, self._voice.step)
                self._pools[pool_id].copy(copies, self._voice.step)
            case m.Stow(pool_id, source, slots):
                with self._link.lent_fds() as [arena]:
                    sums = stow(self._pools[pool_id], source, slots, arena, self._voice.step)
                return m.Done(checksums=sums)
            case m.Fetch(pool_id, slots, destination, sums):
                with self._link.lent_fds() as [arena]:
                    pool, on_step = self._pools[pool_id], self._voice.step
                    return m.Done(damaged=fetch(pool, slots, destination, sums, arena, on_step))
            case m.Punch(slot_bytes, slots):
                with self._link.lent_fds() as [file]:
                    punch(file, slot_bytes, slots)
            case m.Observe():
                self._observe(request)
            case m.Compress():
                return self._compress(request)
            case m.Ping():
                pass
            case _:
                raise wire.WireError(f"{type(request).__name__} is no request")
        return m.Done()

    def _map(self, request: m.MapPool) -> MappedPool:
        spec, fds = KVSpec(**request.spec), self._link.take_fds()
        if request.kind == "host":
            return MappedPool(spec, request.blocks_total, *fds)
        return self._gpus.map_pool(spec, request, fds)

    def _observe(self, request: m.Observe) -> None:
        pool = self._pools[request.pool_id]
        queries = pool.queries(request)
        assert queries is not None, "an observation without queries"
        self._backend(pool).observe(pool.lease(request), queries)

    def _compress(self, request: m.Compress) -> m.Done:
        pool = self._pools[request.pool_id]
        pool.scrub(request.scrub_runs, self._voice.step)
        planes, queries, backend = pool.lease(request), pool.queries(request), self._backend(pool)
        if request.method == "h2o" and queries is not None:
            planes = _observed(backend, planes, queries)
        result = compress(backend, planes, _plan(request), queries)
        blocks = np.zeros(0, np.int32) if result.kept_block_indices is None else result.kept_block_indices
        mass = np.zeros(0, np.float32) if result.mass_retained is None else result.mass_retained
        return m.Done(
            kept_tokens=result.kept_length,
            kept_blocks=blocks.astype(np.int32),
            mass_retained=mass.astype(np.float32),
        )


def _observed(backend: Backend, planes: KVPlanes, queries: WindowQueries) -> KVPlanes:
    """H2O with queries is an observation and a compression in one."""
    unobserved = planes.length - planes.observed_length
    if queries.count > unobserved:
        raise KernelInputError(
            f"queries of {queries.count} tokens, {unobserved} were not observed yet; none may vote twice"
        )
    backend.observe(planes, queries)
    return replace(planes, observed_length=planes.length)


def _plan(request: m.Compress) -> CompressPlan:
    rope = Rope(request.inv_freq, request.rope_style) if request.inv_freq.size else None
    return CompressPlan(
        method=request.method,
        target_tokens=request.target_tokens,
        sinks=request.sinks,
        window=request.window,
        kernel=request.kernel,
        pooling=request.pooling,
        reduce=request.reduce,
        destination_table=request.destination if request.destination.size else None,
        rope=rope,
    )


def serve(connection: socket.socket, threads: int, cache: Path) -> None:
    """Until the daemon is gone, or a GPU fails: whatever was under way on it is undefined then."""
    torch.set_num_threads(threads)
    link = DaemonLink(connection)
    voice = Voice(link)
    try:
        warm_up(voice.step)
        worker = KernelWorker(link, voice, cache)
        link.send(m.Ready())
        worker.serve()
    except (DaemonGoneError, ConnectionError):
        LOG.info("the daemon is gone; kernel worker %d ends", os.getpid())
    except CudaError as error:
        LOG.error("the GPU fails: %s", error)
