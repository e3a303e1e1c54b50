"""A request that is repeated after a restart gets the reply that it got, or would have got, before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.snapshot import state_of
from tests.daemon.engine_room import TTL_NS, numba_cache, open_session

from kvd.errors import RequestReusedError
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import Limits, Losses
from kvd_daemon.device.fence_memory import FenceMemory
from kvd_daemon.device.host import HostMemory
from kvd_daemon.engine.engine import DeviceSettings, Engine
from kvd_daemon.engine.inheritance import Inheritance, Recovery
from kvd_daemon.engine.sessions import OpenSession
from kvd_daemon.fd_store import NO_STORE
from kvd_daemon.journal import RecordingDevice, open_journal
from kvd_daemon.journal.calls import ToldCall
from kvd_daemon.journal.codec import Decoder
from kvd_daemon.journal.records import Record, decoded
from kvd_daemon.journal.segments import SegmentReader
from kvd_daemon.kernel.link import WorkerCommand
from kvd_daemon.rpc.answering import begun, settled
from kvd_daemon.rpc.calls import CALLS
from kvd_daemon.rpc.lease_service import LeaseService
from kvd_daemon.rpc.requests import asker_of

from .shelf import shelf

SPEC = KVSpec(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=8, dtype="float32")
MEMORY_BYTES = 64 << 20
STREAM = pb.Policy(streaming=pb.StreamingPolicy(sinks=4, window=28, rope="original"))


@contextlib.asynccontextmanager
async def engine_on(device: RecordingDevice) -> AsyncIterator[Engine]:
    fences = FenceMemory.create(device.limits.leases + 1)
    device.fences.move_to(fences.words)
    settings = DeviceSettings("host0", MEMORY_BYTES, TTL_NS)
    inheritance = Inheritance(device, NO_STORE, fences, Recovery("fresh"))
    engine = Engine(settings, HostMemory(), WorkerCommand(1, numba_cache()), inheritance)
    background = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        engine.close()


def opened_device(folder: Path) -> RecordingDevice:
    opened = open_journal(folder / "journal", MEMORY_BYTES, Limits(), calls=CALLS)
    assert opened.found.state != "quarantined", opened.found.detail
    return opened.device


def records(folder: Path) -> list[Record | ToldCall]:
    reader = SegmentReader(next((folder / "journal").glob("*.segment")))
    return [decoded(payload, Decoder()) for payload in reader.payloads()]


async def lease(engine: Engine, opened: OpenSession, request: pb.LeaseRequest) -> pb.LeaseResponse:
    service = LeaseService(engine)
    asker = asker_of(opened, request, lambda: None)
    return await settled(begun(engine, opened, request, lambda done: service._lease(asker, request, done)))


async def compress(engine: Engine, opened: OpenSession, request: pb.CompressRequest) -> pb.CompressResponse:
    service = LeaseService(engine)
    return await settled(
        begun(engine, opened, request, lambda done: engine.spawn(service._compress(opened, request, done)))
    )


def never(conclude: Callable[[Any], Any]) -> Any:
    raise AssertionError("it was carried out a second time")


def repeated(engine: Engine, opened: OpenSession, request: Any, reply: Any) -> None:
    """The same as before, but for who tells it."""
    again = begun(engine, opened, request, never)
    assert again.epoch == engine.epoch != reply.epoch
    again.epoch = reply.epoch
    assert again == reply


async def calls(engine: Engine, one: OpenSession, two: OpenSession) -> list[tuple[OpenSession, Any, Any]]:
    """A lease, one that must be scrubbed before, a compression, one of nothing: who, what, which reply."""
    told: list[tuple[OpenSession, Any, Any]] = []
    items = [pb.LeaseItem(tokens=20 * 16)]
    first = pb.LeaseRequest(request_id="first", pool="pool", items=items)
    told.append((one, first, await lease(engine, one, first)))
    engine.leases.release(one, [told[0][2].leases[0].lease_id])
    second = pb.LeaseRequest(request_id="second", pool="pool", items=items)
    told.append((two, second, await lease(engine, two, second)))
    progress = pb.LeaseProgress(
        lease_id=told[1][2].leases[0].lease_id, generation=1, length=320, position=320
    )
    third = pb.CompressRequest(request_id="third", progress=progress, policy=STREAM)
    told.append((two, third, await compress(engine, two, third)))
    progress = pb.LeaseProgress(lease_id=progress.lease_id, generation=2, length=32, position=320)
    fourth = pb.CompressRequest(request_id="fourth", progress=progress, policy=STREAM)
    told.append((two, fourth, await compress(engine, two, fourth)))
    return told


def each_reply_is_in_the_record_of_the_event_that_led_to_it(
    all_: list[Record | ToldCall], replies: list[Any]
) -> None:
    """The first lease's record is its request; the second one had to wait for zeros."""
    call, *others = [each for each in all_ if isinstance(each, ToldCall) or each.reply]
    assert isinstance(call, ToldCall)
    assert call.method == "LeaseRequest"
    assert call.reply == replies[0].SerializeToString()
    answering = [record for record in others if isinstance(record, Record)]
    assert {r.reply.request_id: [event.name for event in r.events] for r in answering} == {
        "second": ["scrubbed"],
        "third": ["finish_compress"],
        "fourth": ["begin_compress"],
    }
    assert [r.reply.content for r in answering] == [reply.SerializeToString() for reply in replies[1:]]


def test_leases_scrubs_and_compressions_are_answered_as_before_a_restart() -> None:
    async def story(folder: Path) -> None:
        device = opened_device(folder)
        async with engine_on(device) as engine:
            engine.pools.create("pool", SPEC, 31)
            one, two = open_session(engine, "one"), open_session(engine, "two")
            told = await calls(engine, one, two)
            assert told[2][2].report.blocks_after == 2
            assert told[3][2].report.unchanged
            for opened, request, reply in told:
                assert begun(engine, opened, request, never) == reply
            device.journal.close()
        each_reply_is_in_the_record_of_the_event_that_led_to_it(records(folder), [r for _, _, r in told])
        again = opened_device(folder)
        assert state_of(again) == state_of(device)
        again.recover(1, TTL_NS, Losses(list(again.pools)))
        before = state_of(again)
        async with engine_on(again) as engine:
            for opened, request, reply in told:
                repeated(engine, opened, request, reply)
                with pytest.raises(RequestReusedError):
                    begun(engine, opened, pb.ReleaseRequest(request_id=request.request_id), never)
        assert state_of(again) == before
        again.journal.remove()
        for opened in (one, two):
            opened.peer.close()

    with shelf() as folder:
        asyncio.run(story(folder))
