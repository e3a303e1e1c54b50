"""The same client for asyncio: whatever may wait for the daemon runs in a thread and is awaited.

    import kvd_client.aio

    pool = await (await kvd_client.aio.connect()).pool("llama3-8b", spec, blocks=2048)
    async with await pool.lease(tokens=4096) as lease:
        slots = await lease.extend(4096)
        lease.commit(4096)  # local, as all that is not a call to the daemon

On a GPU, `await pool.wait_for(stream)` before a commit: `commit(stream=...)` would hold up the event loop.

Events are read without waiting, `client.events.drain()`, or in a thread of yours:
`await asyncio.to_thread(client.events.get, 5.0)`.

Calls, arguments and errors are those of `kvd_client`. Cancelling an await does not stop the call under way.
"""

import asyncio
from typing import Any

import kvd_client
from kvd.arguments import refused
from kvd_client._client import Client
from kvd_client._lease import Lease
from kvd_client._match import Match
from kvd_client._pool import Pool

AWAITED = {
    Client: {"pool", "close"},
    Pool: {
        *("lease", "lease_many", "extend_many", "release_many", "wait_for", "close"),
        *("match", "pin", "unpin", "adopt"),
    },
    Lease: {
        *("extend", "trim", "seal", "seal_prompt", "release", "compress", "observe"),
        *("publish", "transfer", "fork", "rest", "wake", "suspend", "resume", "restore"),
    },
    Match: {"release"},
}


class Async:
    """A Client, Pool, Lease or Match (as `sync`) whose calls to the daemon are coroutines."""

    def __init__(self, sync: Client | Pool | Lease | Match) -> None:
        if type(sync) not in AWAITED:
            raise refused("sync", sync, "a kvd_client Client, Pool, Lease or Match")
        self.sync = sync

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.sync, name)
        if name not in AWAITED[type(self.sync)]:
            return attribute

        async def call(*arguments: Any, **named: Any) -> Any:
            sync = [_unwrapped(argument) for argument in arguments]
            sync_named = {name: _unwrapped(argument) for name, argument in named.items()}
            return _wrapped(await asyncio.to_thread(attribute, *sync, **sync_named))

        return call

    async def __aenter__(self) -> "Async":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.sync.__exit__, None, None, None)


async def connect(*arguments: Any, **named: Any) -> Any:
    """As `kvd_client.connect`."""
    return _wrapped(await asyncio.to_thread(kvd_client.connect, *arguments, **named))


def _wrapped(result: Any) -> Any:
    if isinstance(result, list):
        return [_wrapped(one) for one in result]
    return Async(result) if type(result) in AWAITED else result


def _unwrapped(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [one.sync if isinstance(one, Async) else one for one in argument]
    return argument.sync if isinstance(argument, Async) else argument
