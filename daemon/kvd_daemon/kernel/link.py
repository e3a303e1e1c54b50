"""One kernel worker process and the socket to it."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd_daemon.kernel import wire
from kvd_daemon.kernel.messages import Message, Request

COLLECT_S = 1.0  # seconds to collect a killed worker, in which nothing else happens; it takes milliseconds
LOG = logging.getLogger("kvd.kernel")


@dataclass(frozen=True)
class WorkerCommand:
    """How to start a worker: threads, where compiled kernels are kept, a descriptor it inherits, module;
    and what the log calls it.

    The lock's: who holds the lock of a device's folder knows that the last daemon's worker is gone as well,
    and nobody else moves bytes.
    """

    threads: int
    cache_dir: Path
    lock_fd: int | None = None
    module: str = "kvd_daemon.kernel.worker"
    name: str = "kernel worker"

    def start(self, worker_end: socket.socket) -> "subprocess.Popen[bytes]":
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.threads),
            "NUMBA_CACHE_DIR": str(self.cache_dir),
        }
        module = [sys.executable, "-m", self.module]
        arguments = [str(worker_end.fileno()), str(os.getpid()), str(self.threads), str(self.cache_dir)]
        lock = [] if self.lock_fd is None else [self.lock_fd]
        return subprocess.Popen(
            module + arguments,
            pass_fds=[worker_end.fileno(), *lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )


class WorkerLink(asyncio.Protocol):
    """Calls `on_message` for every message; `ended` is set when the worker is gone."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (message := self._next()) is not None:
                self._on_message(message)
        except wire.WireError as error:
            LOG.error("a worker sent nonsense: %s", error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()

    def _next(self) -> Message | None:
        if len(self._received) < wire.PREFIX.size:
            return None
        header_bytes, body_bytes = wire.sizes(bytes(self._received[: wire.PREFIX.size]))
        body_at = wire.PREFIX.size + header_bytes
        end = body_at + body_bytes
        if len(self._received) < end:
            return None
        message = wire.decode(
            bytes(self._received[wire.PREFIX.size : body_at]), bytes(self._received[body_at:end])
        )
        del self._received[:end]
        return message

    def send(self, request: Request) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(request))

    def write(self, rest: bytes) -> None:
        """Of a frame whose beginning has been sent."""
        assert self._transport is not None
        self._transport.write(rest)

    def close(self) -> None:
        """Hear nothing more of it."""
        assert self._transport is not None
        self._transport.abort()


class WorkerProcess:
    """A started worker: to be killed, or gone by itself, then `let_go`."""

    def __init__(self, process: "subprocess.Popen[bytes]", raw: socket.socket, link: WorkerLink) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._raw = raw
        self._link = link

    @classmethod
    async def start(cls, command: WorkerCommand, on_message: Callable[[Message], None]) -> "WorkerProcess":
        """Raises OSError if the system refuses a process or descriptors; then nothing was started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        with theirs:
            _, link = await loop.create_connection(lambda: WorkerLink(on_message), sock=ours)
            try:
                process = command.start(theirs)  # last of all: no word of it is heard before this returns
            except OSError:
                link.close()
                raise
        try:
            return cls(process, ours, link)
        except OSError:
            link.close()
            process.kill()
            process.wait(COLLECT_S)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Request, fds: Sequence[int] = ()) -> None:
        """Nothing may be under way: descriptors go past the transport's buffer, which is empty then."""
        if not fds:
            self._link.send(request)
            return
        if self._link.ended.is_set():
            return  # as above, where the transport drops what nobody will read: whoever watches it notices
        frame = wire.encode(request)
        try:
            sent = socket.send_fds(self._raw, [frame[: wire.PREFIX.size]], list(fds))
        except ConnectionError:
            return
        assert sent == wire.PREFIX.size, "there is room for some bytes in an empty buffer"
        self._link.write(frame[sent:])

    def kill(self) -> None:
        """None of its threads runs code of ours after this, even if the kernel keeps one for a while."""
        self._process.kill()

    async def ended_within(self, patience_s: float) -> bool:
        """Whether it has closed its end of the socket by then: it is gone, or as good as gone."""
        try:
            await asyncio.wait_for(self._link.ended.wait(), patience_s)
        except TimeoutError:
            return False
        return True

    async def gone_within(self, patience_s: float) -> bool:
        """Kill it if it still runs; whether it has exited by then, and its mappings with it."""
        self.kill()
        exited, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._pidfd, exited.set)
        try:
            await asyncio.wait_for(exited.wait(), patience_s)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        return True

    def let_go(self, patience_s: float) -> bool:
        """Kill it and hear nothing more of it; whether it could be collected within that time."""
        self.kill()
        os.close(self._pidfd)
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        return self.is_collected()

    def is_collected(self) -> bool:
        """Whether nothing of it is left, now."""
        return self._process.poll() is not None
