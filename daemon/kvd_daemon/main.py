"""The daemon of one device: `python -m kvd_daemon.main SETTINGS_JSON DEVICE READY_FD PARENT_PID`.

Writes one byte to READY_FD when it serves. Exit status 2: an operator's mistake, told on stderr.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvd.errors import InvalidArgumentError, KvdError
from kvd_daemon.attach import AttachServer
from kvd_daemon.device.host import HostMemory
from kvd_daemon.engine.engine import DeviceSettings, Engine
from kvd_daemon.kernel.link import WorkerCommand
from kvd_daemon.processes import die_with_parent
from kvd_daemon.rpc.server import Server
from kvd_daemon.run_dir import DeviceDir, private_folder
from kvd_daemon.settings import Settings

GC_THRESHOLDS = (20_000, 20, 50)  # container objects, then collections: about one in a hundred calls
LOG = logging.getLogger("kvd.main")


def main() -> None:
    settings, device = Settings.from_json(sys.argv[1]), sys.argv[2]
    ready_fd, parent_pid = int(sys.argv[3]), int(sys.argv[4])
    die_with_parent(parent_pid)
    _log_to_stderr(settings.log_level, device)
    _allow_many_descriptors()
    try:
        folder = DeviceDir(Path(settings.run_dir), device)
        command = WorkerCommand(settings.kernel_threads, kernel_cache(os.environ))
    except KvdError as error:
        print(f"kvd: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(serve(settings, folder, command, ready_fd))
    finally:
        folder.close()


async def serve(settings: Settings, folder: DeviceDir, command: WorkerCommand, ready_fd: int) -> None:
    """Until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    told = DeviceSettings(folder.path.name, settings.host_memory_bytes, settings.session_ttl_ns)
    engine = Engine(told, HostMemory(), command)
    server = Server(engine, str(folder.grpc_socket_at_first))
    attach = AttachServer(engine, folder.attach_socket)
    await server.start()
    _spare_the_collector()
    folder.publish_grpc()
    os.write(ready_fd, b"1")
    os.close(ready_fd)
    LOG.info("serving %d bytes", settings.host_memory_bytes)
    await _until_stopped(engine, attach, stopping)
    engine.drain()
    attach.close()
    await server.stop()
    engine.close()


async def _until_stopped(engine: Engine, attach: AttachServer, stopping: asyncio.Event) -> None:
    """Background work that fails ends the daemon; the supervisor starts another."""
    background = [asyncio.create_task(engine.run()), asyncio.create_task(attach.run())]
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([*background, stop], return_when=asyncio.FIRST_COMPLETED)
    for task in (*background, stop):
        task.cancel()
    outcomes = await asyncio.gather(*background, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


def kernel_cache(environ: Mapping[str, str]) -> Path:
    """A folder for compiled kernels that only this user can write: code is loaded from there."""
    if chosen := environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    caches = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/nonexistent")) / ".cache")
    try:
        return private_folder(Path(caches) / "kvd" / "numba")
    except InvalidArgumentError:
        return private_folder(Path(tempfile.gettempdir()) / f"kvd-numba-{os.geteuid()}")


def _log_to_stderr(level: str, device: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {device} %(name)s %(message)s",
        stream=sys.stderr,
    )


def _spare_the_collector() -> None:
    """What is imported stays; calls make few cycles, so looking for them every few calls is a waste."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _allow_many_descriptors() -> None:
    """Every session is a stream and a pidfd; the usual soft limit of 1,024 is for select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
