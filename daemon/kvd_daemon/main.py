"""The daemon of one device: `python -m kvd_daemon.main SETTINGS_JSON DEVICE PARENT_PID [FD FD WHEN]`.

The last three are its supervisor's: see `channel`, `fd_store` and `processes`. Exit status 2: an operator's
mistake, told on stderr; 3: all is in order for the next daemon, which shall start at once.
"""

import asyncio
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvd.errors import (
    DeviceUnavailableError,
    ExhaustedError,
    InvalidArgumentError,
    KvdError,
    UnavailableError,
)
from kvd.streams import complain
from kvd_daemon.access.serving_limits import FIXED_AT_START
from kvd_daemon.attach import AttachServer
from kvd_daemon.channel import Channel
from kvd_daemon.connection_watch import watch_connections
from kvd_daemon.core import Limits
from kvd_daemon.device.cuda import memory_bytes, open_gpu
from kvd_daemon.device.host import HostMemory
from kvd_daemon.device.protocol import DeviceMemory
from kvd_daemon.engine.engine import DeviceSettings, Engine
from kvd_daemon.engine.inheritance import inherit, open_state
from kvd_daemon.engine.stopping import Ending
from kvd_daemon.fd_store import NO_STORE, DescriptorStore, FdStore
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.journal_watch import watch_journal
from kvd_daemon.kernel.link import WorkerCommand
from kvd_daemon.processes import (
    DEVICE_FAILED,
    FOLLOWS,
    OPERATOR_MISTAKE,
    RESTART_WANTED,
    allow_many_descriptors,
    die_with_parent,
)
from kvd_daemon.rpc.calls import CALLS
from kvd_daemon.rpc.probe import LeaseProbe
from kvd_daemon.rpc.server import Server
from kvd_daemon.run_dir import DeviceDir, private_folder
from kvd_daemon.settings import Settings
from kvd_daemon.socket_watch import watch_sockets
from kvd_daemon.supervised import Supervised, obey_signals

GC_THRESHOLDS = (20_000, 20, 50)  # container objects, then collections: about one in a hundred calls
TRY_AGAIN = 1  # exit status
JOB_PATIENCE_S = 1.0  # seconds that a job in work gets before a daemon that keeps its leases ends
LOG = logging.getLogger("kvd.main")


def main() -> None:
    os.umask(0o077)  # what is made here is for its owner, until it is given to others
    settings, device = Settings.from_json(sys.argv[1]), sys.argv[2]
    die_with_parent(int(sys.argv[3]))
    _log_to_stderr(settings.log_level, device)
    allow_many_descriptors()
    channel = Channel.of(int(sys.argv[4])) if len(sys.argv) > 4 else None
    store = FdStore(channel, int(sys.argv[5])) if channel is not None else NO_STORE
    try:
        folder = DeviceDir(Path(settings.run_dir), device, settings.socket_gid)
        command = WorkerCommand(settings.kernel_threads, kernel_cache(os.environ), folder.lock_fd)
        serving = Serving(*device_memory(settings, device), store, FOLLOWS in sys.argv[6:])
    except DeviceUnavailableError as error:  # the GPU; in a while it may be there again
        complain(f"kvd: {device}: {error}")
        sys.exit(DEVICE_FAILED)
    except KvdError as error:
        complain(f"kvd: {error}")
        sys.exit(OPERATOR_MISTAKE)
    try:
        ending = asyncio.run(serve(settings, folder, command, serving, channel))
    except InvalidArgumentError as error:  # a port that is taken, a certificate that is none
        complain(f"kvd: {error}")
        sys.exit(OPERATOR_MISTAKE)
    except (UnavailableError, ExhaustedError) as error:  # no room for a journal; there may be some later
        LOG.error("%s", error)
        sys.exit(TRY_AGAIN)
    finally:
        folder.close()
    sys.exit(RESTART_WANTED if ending is Ending.RESTART else 0)


@dataclass(frozen=True)
class Serving:
    """A device's memory, how many bytes pools may take of it, and who keeps their descriptors.

    `follows`: after other daemons of this kvd, which had accepted its settings.
    """

    memory: DeviceMemory
    byte_count: int
    store: DescriptorStore
    follows: bool


def device_memory(settings: Settings, device: str) -> tuple[DeviceMemory, int]:
    """Raises DeviceUnavailableError for a GPU that cannot be used, InvalidArgumentError for a wrong size."""
    uuid = settings.gpu_uuid(device)
    if uuid is None:
        return HostMemory(), settings.host_memory_bytes
    gpu, memory = open_gpu(uuid, settings.gpu_sharing)
    return memory, memory_bytes(gpu, settings.memory)


async def serve(
    settings: Settings,
    folder: DeviceDir,
    command: WorkerCommand,
    serving: Serving,
    channel: Channel | None,
) -> Ending:
    """Until somebody wants an end; answers which one."""
    device, byte_count = folder.path.name, serving.byte_count
    guarding = settings.guarding(device)
    told = DeviceSettings(device, byte_count, settings.session_ttl_ns, guarding, settings.spill_dir)
    opened = open_state(folder.journal, byte_count, serving.store, CALLS, Limits(eviction=settings.eviction))
    inheritance = inherit(opened, serving.memory, serving.store)
    engine = Engine(told, serving.memory, command, inheritance)
    supervised = Supervised(channel, engine) if channel is not None else None
    obey_signals(engine, settings.drain_timeout_ns / 1e9)
    _obey_settings(engine, settings)
    server, attach = _doors(engine, settings, folder)
    await (server.tcp.try_to_open() if serving.follows else server.tcp.open())
    await server.start()
    _spare_the_collector()
    folder.publish_grpc()
    LOG.info("serving %d bytes", byte_count)
    probe = LeaseProbe(str(folder.grpc_socket))
    watching = watch_sockets(folder, engine.health, _bound_again(server, attach, folder))
    connections = watch_connections(engine, str(folder.grpc_socket_at_first), lambda: server.tcp.port)
    background = [
        connections,
        engine.run(),
        attach.run(),
        engine.probing.ask(probe),
        server.tcp.run(),
        watching,
    ]
    if opened.device.journal is not None:
        opened.device.journal.only_while(lambda: folder.is_ours)
        background.append(watch_journal(opened.device.journal, engine.health))
    if supervised is not None:
        supervised.ready()
        background.append(supervised.run())
    ending = await _until_stopped(engine, background)
    attach.close()
    engine.end_streams()
    await server.stop()
    _leave(inheritance.device, ending)
    engine.close()
    return ending


def _obey_settings(engine: Engine, settings: Settings) -> None:
    """Those of now, and those to come."""
    engine.admission.set_quotas(settings.tenants)
    engine.parking.set_budgets(settings.host_tier_bytes, settings.spill_size_bytes)
    engine.on_reload(lambda written: engine.admission.set_quotas(written.tenants))
    engine.on_reload(_change_log_level)
    engine.on_reload(lambda written: _change_eviction(engine.device, written))


def _leave(device: RecordingDevice, ending: Ending) -> None:
    """The journal, in a form that another version of kvd can go on from; or no journal, with the memory."""
    if device.journal is None:
        return
    if not ending.keeps:
        return device.journal.remove()
    try:
        device.journal.snapshot_now()
    except UnavailableError as error:  # the same version can go on all the same
        LOG.error("%s", error)
    device.journal.close()


def _doors(engine: Engine, settings: Settings, folder: DeviceDir) -> tuple[Server, AttachServer]:
    """Raises InvalidArgumentError if a socket cannot be bound."""
    server = Server(engine, str(folder.grpc_socket_at_first), settings.listening)
    attach = AttachServer(engine, folder.attach_socket)
    folder.publish(folder.attach_socket)
    engine.on_reload(lambda written: _judge_anew(engine, written))
    engine.on_reload(lambda written: server.tcp.reload(written.listening))
    return server, attach


def _bound_again(
    server: Server, attach: AttachServer, folder: DeviceDir
) -> dict[Path, Callable[[], Awaitable[None]]]:
    """How each socket is bound again."""

    async def bind_grpc() -> None:
        await server.bind_again(str(folder.grpc_socket_at_first), folder.publish_grpc)

    async def bind_attach() -> None:
        attach.bind_again()
        folder.publish(folder.attach_socket)

    return {folder.grpc_socket: bind_grpc, folder.attach_socket: bind_attach}


async def _until_stopped(engine: Engine, background: Sequence[Coroutine[Any, Any, None]]) -> Ending:
    """Background work that fails ends the daemon; the supervisor starts another."""
    working = [asyncio.create_task(work) for work in background]
    end = asyncio.create_task(_drained(engine))
    await asyncio.wait([*working, end], return_when=asyncio.FIRST_COMPLETED)
    for task in working:
        task.cancel()
    for outcome in await asyncio.gather(*working, return_exceptions=True):
        if isinstance(outcome, Exception):
            end.cancel()
            raise outcome
    return await end


async def _drained(engine: Engine) -> Ending:
    wanted = await engine.stopping.asked()
    engine.gate.audit.noted("drain", wanted.ending.value, {"leases": engine.held_leases()})
    if wanted.ending is Ending.RESTART:
        engine.health.drain()  # a retry in a second finds the next daemon: workers keep what they have
        engine.admission.close()  # who waits for blocks waits there
    else:
        engine.drain()
        await engine.drained(wanted.patience_s)
    if wanted.ending.keeps:
        await engine.kernel.rest(JOB_PATIENCE_S)
    return wanted.ending


def _judge_anew(engine: Engine, settings: Settings) -> None:
    """The rules, tenants of pools and limits that are written now count."""
    before = engine.gate.limits
    engine.gate.apply(settings.guarding(engine.settings.name))
    for name in FIXED_AT_START:
        if getattr(before, name) != getattr(settings.limits, name):
            LOG.warning("limits.%s counts from the next start of this daemon on", name)
    engine.sessions.judge_again()
    engine.gate.audit.noted("reload", "settings", {"outcome": "done"})


def _change_log_level(settings: Settings) -> None:
    logging.getLogger().setLevel(settings.log_level.upper())


def _change_eviction(device: RecordingDevice, settings: Settings) -> None:
    if device.limits.eviction != settings.eviction:
        device.configure(device.memory_bytes, replace(device.limits, eviction=settings.eviction))


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


if __name__ == "__main__":
    main()
