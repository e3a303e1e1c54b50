"""Records that are a call's own bytes: they tell what the event, spelled out, would have told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.snapshot import state_of

from kvd.convert import policy_to_proto
from kvd.errors import PoolExhaustedError
from kvd.policy import Dense, Dual, SnapKV, Span, Streaming
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import Limits, SessionIdentity
from kvd_daemon.journal import RecordingDevice, Reply, digest_of, open_journal
from kvd_daemon.journal.calls import ToldCall
from kvd_daemon.journal.codec import Decoder, encode
from kvd_daemon.journal.records import decoded
from kvd_daemon.journal.segments import SegmentReader
from kvd_daemon.rpc.calls import CALLS, extended, granted, growth_of, wishes_of

from .shelf import shelf

SPEC = KVSpec(layers=1, kv_heads=1, head_dim_k=2, head_dim_v=2, dtype="float32", block_size=4)
POLICIES = (Dense(), Streaming(sinks=4, window=8), SnapKV(window=2), Dual(), Span())
SESSION, POOL, TTL_NS = "one", "pool", 10**9
MEMORY_BYTES = 1 << 20


def device_in(folder: Path) -> RecordingDevice:
    opened = open_journal(folder / "journal", MEMORY_BYTES, Limits(), calls=CALLS)
    assert opened.found.state in ("fresh", "recovered"), opened.found.detail
    return opened.device


def new_device(folder: Path) -> RecordingDevice:
    device = device_in(folder)
    device.create_pool(POOL, SPEC, 60, "id")
    device.open_session(SessionIdentity(SESSION, "tenant", 1, 1), TTL_NS, 0)
    return device


def carried_out(device: RecordingDevice, request: Any, act: Callable[[], Any]) -> Any:
    """As an RPC is: what `act` answers is the reply."""
    method, content = type(request).__name__, request.SerializeToString()
    with device.call(SESSION, method, content):
        reply = act()
        told = Reply(
            SESSION, request.request_id, digest_of(method, content), method, reply.SerializeToString()
        )
        device.replied(told)
    return reply


def lease(device: RecordingDevice, request: pb.LeaseRequest, epoch: str = "epoch") -> pb.LeaseResponse:
    def act() -> pb.LeaseResponse:
        return granted(device.lease(SESSION, POOL, wishes_of(request), 1), epoch)

    return carried_out(device, request, act)


def extend(device: RecordingDevice, request: pb.ExtendRequest) -> pb.ExtendResponse:
    return carried_out(
        device, request, lambda: extended(device.extend(SESSION, growth_of(request), 2), "epoch")
    )


def last_record(folder: Path) -> Any:
    reader = SegmentReader(max((folder / "journal").glob("*.segment")))
    return decoded([*reader.payloads()][-1], Decoder())


def items(*tokens: int) -> list[pb.LeaseItem]:
    return [pb.LeaseItem(tokens=each) for each in tokens]


wishes = st.lists(
    st.builds(
        lambda tokens, policy: pb.LeaseItem(tokens=tokens, policy=policy_to_proto(policy)),
        st.integers(0, 40),
        st.sampled_from(POLICIES),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(wishes, min_size=1, max_size=4), st.integers(0, 30))
def test_a_device_comes_back_from_requests_and_replies(calls: list[list[pb.LeaseItem]], more: int) -> None:
    with shelf() as folder:
        device = new_device(folder)
        for number, wanted in enumerate(calls):
            request = pb.LeaseRequest(request_id=f"lease {number}", pool=POOL, items=wanted)
            try:
                reply = lease(device, request)
            except PoolExhaustedError:
                continue
            assert isinstance(last_record(folder), ToldCall)
            for state in reply.leases:
                progress = pb.LeaseProgress(
                    lease_id=state.lease_id, generation=state.generation, length=0, position=0
                )
                growth = [pb.ExtendItem(progress=progress, tokens=more)]
                try:
                    extend(device, pb.ExtendRequest(request_id=f"grow {state.lease_id}", items=growth))
                except PoolExhaustedError:
                    continue
                assert isinstance(last_record(folder), ToldCall)
        device.journal.close()
        again = device_in(folder)
        assert state_of(again) == state_of(device)
        assert again.replies.kept(again.sessions) == device.replies.kept(device.sessions)
        again.journal.close()


def test_without_a_request_id_the_event_is_spelled_out() -> None:
    with shelf() as folder:
        device = new_device(folder)
        request = pb.LeaseRequest(pool=POOL, items=items(8))
        with device.call(SESSION, "LeaseRequest", request.SerializeToString()):
            device.lease(SESSION, POOL, wishes_of(request), 1)
        record = last_record(folder)
        assert [event.name for event in record.events] == ["lease"]
        assert record.reply is None
        device.journal.close()
        assert state_of(device_in(folder)) == state_of(device)


def test_another_event_in_the_same_call_spells_both_out() -> None:
    with shelf() as folder:
        device = new_device(folder)
        request = pb.LeaseRequest(request_id="a", pool=POOL, items=items(8))

        def act() -> pb.LeaseResponse:
            answer = granted(device.lease(SESSION, POOL, wishes_of(request), 1), "epoch")
            device.detach(SESSION, 1)
            return answer

        carried_out(device, request, act)
        record = last_record(folder)
        assert [event.name for event in record.events] == ["lease", "detach"]
        assert record.reply is not None
        device.journal.close()
        assert state_of(device_in(folder)) == state_of(device)


def test_a_call_that_breaks_off_after_its_event_is_not_lost() -> None:
    with shelf() as folder:
        device = new_device(folder)
        request = pb.LeaseRequest(request_id="a", pool=POOL, items=items(8))

        def act() -> pb.LeaseResponse:
            device.lease(SESSION, POOL, wishes_of(request), 1)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            carried_out(device, request, act)
        assert [event.name for event in last_record(folder).events] == ["lease"]
        lease(device, pb.LeaseRequest(request_id="b", pool=POOL, items=items(4)))
        assert isinstance(last_record(folder), ToldCall)
        device.journal.close()
        again = device_in(folder)
        assert state_of(again) == state_of(device)
        assert again.replies.find(SESSION, "a") is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "NoRequest"}, "no call is a NoRequest"),
        ({"request": b"\xff\xff"}, "no LeaseRequest has such bytes"),
        ({"request": pb.LeaseRequest(request_id="a", pool="none").SerializeToString()}, "fails again"),
        ({"request": pb.LeaseRequest(pool=POOL, items=items(16)).SerializeToString()}, "another reply"),
        ({"reply": b"\x0a\x05epoch"}, "another reply"),
        ({"reply": b"\xff"}, "no LeaseRequest has such bytes"),
        ({"session_id": "stranger"}, "fails again"),
    ],
)
def test_what_cannot_have_happened_is_found_out(change: dict[str, Any], says: str) -> None:
    with shelf() as folder:
        device = new_device(folder)
        lease(device, pb.LeaseRequest(request_id="a", pool=POOL, items=items(8)))
        told = last_record(folder)
        device.journal.append(told._replace(**change).encoded())
        device.journal.close()
        found = open_journal(folder / "journal", MEMORY_BYTES, Limits(), calls=CALLS).found
        assert found.state == "quarantined"
        assert says in found.detail


@given(st.text(max_size=9), st.text(max_size=9), st.integers(0, 2**62), st.binary(), st.binary())
def test_a_call_is_written_as_the_codec_writes_values(
    method: str, session_id: str, now_ns: int, request: bytes, reply: bytes
) -> None:
    told = ToldCall(method, session_id, now_ns, request, reply)
    assert told.encoded() == b"".join(map(encode, told))
    assert decoded(told.encoded(), Decoder()) == told
