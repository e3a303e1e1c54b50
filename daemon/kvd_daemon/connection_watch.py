"""Looks again and again whether somebody holds more of the doors' connections than its share."""

import asyncio
import contextlib
import os
from collections.abc import Callable

from kvd.errors import LimitExceededError
from kvd_daemon.access.audit import Caller
from kvd_daemon.engine.connections import FOLDER, OpenSockets, Shares, offences
from kvd_daemon.engine.engine import Engine

LOOK_EVERY_S = 1.0  # seconds; a look at a daemon with few descriptors costs one call
LOOK_AGAIN_S = 0.1  # seconds, after somebody had too many: a flood comes back
CUT_AT_ONCE = 256  # connections, some milliseconds; then it is others' turn
FEW_DESCRIPTORS = 64  # of the daemon's own; with so few more nobody can have too many connections
PER_SESSION, PER_POOL = 2, 2  # descriptors: a connection and a pidfd, bytes and sidecar


async def watch_connections(engine: Engine, unix_path: str, tcp_port: Callable[[], int]) -> None:
    """Until cancelled. `unix_path` is where gRPC bound its socket."""
    while True:
        flooded = False
        with contextlib.suppress(OSError):  # no descriptor to look with: perhaps the next time
            if len(os.listdir(FOLDER)) > _explained(engine):
                flooded = await _cut(engine, OpenSockets(unix_path, tcp_port()))
        await asyncio.sleep(LOOK_AGAIN_S if flooded else LOOK_EVERY_S)


def _explained(engine: Engine) -> int:
    """Descriptors that workers at work account for: a look at each of thousands would delay their calls."""
    device = engine.device
    return FEW_DESCRIPTORS + PER_SESSION * len(device.sessions) + PER_POOL * len(device.pools)


async def _cut(engine: Engine, sockets: OpenSockets) -> bool:
    """Whether there was anything to cut."""
    at_work = {(opened.peer.uid, opened.peer.pid) for opened in engine.sessions}
    found = list(offences(sockets, at_work, Shares.of(engine.gate.limits)))
    for offence in found:
        for at in range(0, len(offence.excess), CUT_AT_ONCE):
            sockets.cut(offence.excess[at : at + CUT_AT_ONCE])
            await asyncio.sleep(0)
        what = f"{offence.held} connections, {len(offence.excess)} of them are closed"
        engine.gate.audit.refused(Caller("connections", offence.who), "connect", LimitExceededError(what))
    return bool(found)
