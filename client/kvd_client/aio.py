"""The same client for asyncio: whatever may wait for the daemon runs in a thread and is awaited.

    import kvd_client.aio

    pool = await (await kvd_client.aio.connect()).pool("llama3-8b", spec, blocks=2048)
    async with await pool.lease(tokens=4096) as lease:
        slots = await lease.extend(4096)
        lease.commit(4096)  # local, as all that is not a call to the daemon

On a GPU, `await pool.wait_for(stream)` before a commit: `commit(stream=...)` would hold up the event loop.

Events are read without waiting, `client.events.drain()`, or in a thread of yours:
`await asyncio.to_thread(client.events.get, 5.0)`.

Calls, arguments and errors are those of `kvd_client`. Cancelling an await does not stop the call under way:
leases it makes are released, a pin it makes stays (`kvctl pin list`). An `adopt` may adopt all the same, and
what it adopts is not released, which would be the sequence's end: it is taken up by the next `adopt` of that
key by the same object, as one that broke off is.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import kvd_client
from kvd.arguments import refused
from kvd.errors import KvdError
from kvd_client._client import Client
from kvd_client._handing import shelf_name
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
        *("publish", "transfer", "fork", "rest", "wake", "suspend", "resume", "restore", "drop_checkpoint"),
    },
    Match: {"release"},
}

MAX_ADOPTING = 64  # threads of a process that wait for publications; further ones wait for a thread
_ADOPTING = ThreadPoolExecutor(MAX_ADOPTING, "kvd-adopt")


class Async:
    """A Client, Pool, Lease or Match (as `sync`) whose calls to the daemon are coroutines."""

    def __init__(self, sync: Client | Pool | Lease | Match) -> None:
        if type(sync) not in AWAITED:
            raise refused("sync", sync, "a kvd_client Client, Pool, Lease or Match")
        self.sync = sync
        self._given_up: list[tuple[str, Future[Lease]]] = []
        """By key, adoptions that nobody awaits any more. They may adopt all the same."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.sync, name)
        if name == "adopt":
            return partial(self._adopt, attribute)
        if name not in AWAITED[type(self.sync)]:
            return attribute

        async def call(*arguments: Any, **named: Any) -> Any:
            sync = [_unwrapped(argument) for argument in arguments]
            sync_named = {name: _unwrapped(argument) for name, argument in named.items()}
            return _wrapped(await asyncio.to_thread(attribute, *sync, **sync_named))

        return call

    async def _adopt(self, adopt: Callable[..., Lease], key: str, *arguments: Any, **named: Any) -> "Async":
        """Those that were given up come first: one of them may have the lease."""
        key = shelf_name("key", key)
        while (earlier := self._pop_given_up(key)) is not None:
            with suppress(KvdError):
                return await self._adopted(key, earlier)
        return await self._adopted(key, _ADOPTING.submit(adopt, key, *arguments, **named))

    async def _adopted(self, key: str, adoption: Future[Lease]) -> "Async":
        try:
            lease: Lease = await asyncio.wrap_future(adoption)
        except asyncio.CancelledError:
            self._given_up.append((key, adoption))
            raise
        return Async(lease)

    def _pop_given_up(self, key: str) -> Future[Lease] | None:
        self._given_up = [each for each in self._given_up if not _failed(each[1])]
        for index, (name, adoption) in enumerate(self._given_up):
            if name == key:
                del self._given_up[index]
                return adoption
        return None

    async def __aenter__(self) -> "Async":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.sync.__exit__, None, None, None)


def _failed(adoption: Future[Lease]) -> bool:
    return adoption.done() and (adoption.cancelled() or adoption.exception() is not None)


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
