"""The rule of `kvd.arguments`: every argument of every public call, with every odd value.

An odd value is an InvalidArgumentError at the call's own surface, or it is one of those that the call is
said here to take; nothing has changed either way.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvd_client
import kvd_client.aio

from .conftest import NewPool
from .daemon import Daemon
from .odd_values import Call, Foreign, odd_values

QUERIES = np.zeros((2, 8, 4, 16), np.float32)
GEOMETRY = {"layers": 2, "kv_heads": 2, "head_dim": 16}
ROWS = np.zeros((1, 2, 16), np.float32)
SNAP = kvd_client.SnapKV(window=8, keep=0.5)


@dataclass(frozen=True)
class Argument:
    """`call(things, value)` passes `value` as the argument.

    takes  odd values that are fine
    skips  odd values that are fine too, but change something, or take time
    """

    call: Call
    takes: frozenset[str] = frozenset()
    skips: frozenset[str] = frozenset()


def arg(call: Call, *takes: str, skips: Sequence[str] = ()) -> Argument:
    return Argument(call, frozenset(takes), frozenset(skips))


def policy_arg(policy: type, name: str, *takes: str) -> Argument:
    return arg(lambda _, value: policy(**{name: value}), *takes)


def spec_arg(name: str, *takes: str) -> Argument:
    return arg(lambda _, value: kvd_client.KVSpec(**GEOMETRY | {name: value}), *takes)


def connected(things: Any, **given: Any) -> None:
    """Connect and go. A device that is not there is no wrong value."""
    with suppress(kvd_client.DeviceUnavailableError):
        kvd_client.connect(**{"endpoint": things.run_dir} | given).close()


def attached(things: Any, name: Any) -> None:
    """Attach to a pool that need not be there."""
    with suppress(kvd_client.PoolNotFoundError):
        things.client.pool(name, things.pool.spec)


def adopting(things: Any, key: Any, wait: Any = 0.0) -> None:
    """Nothing is there to adopt."""
    with suppress(kvd_client.OfferNotFoundError):
        things.pool.adopt(key, wait)


TIMES = ("1.5", "numpy 1.5")
TEXTS = ("empty text", "text")
POLICIES = {
    f"{policy.__name__} {name}": arg(
        lambda _, value, policy=policy, name=name: policy(**{name: value}), *takes
    )
    for policy, names in {
        kvd_client.Streaming: {"sinks": ["0"], "window": [], "rope": []},
        kvd_client.SnapKV: {"sinks": ["0"], "window": [], "kernel": [], "pooling": [], "keep": []},
        kvd_client.Dual: {"sinks": ["0"], "keep": []},
        kvd_client.H2O: {"sinks": ["0"], "recent": ["0"], "keep": []},
        kvd_client.Span: {"sinks": ["0"], "window": [], "kernel": [], "granularity": [], "keep": []},
    }.items()
    for name, takes in names.items()
}
SPECS = {
    f"KVSpec {name}": spec_arg(name, *takes)
    for name, takes in {
        "layers": [],
        "kv_heads": [],
        "head_dim": [],
        "dtype": [],
        "block_size": [],
        "layout": [],
        "backend": [*TEXTS, "text with zero"],
    }.items()
}
VALUES = {
    "Keep.of": arg(lambda _, value: kvd_client.Keep.of(value)),
    "Keep ratio": arg(lambda _, value: kvd_client.Keep(ratio=value)),
    "Keep tokens": arg(lambda _, value: kvd_client.Keep(tokens=value)),
    "Rope inv_freq": arg(
        lambda _, value: kvd_client.Rope(value), "list of -1", "numpy array", "torch tensor"
    ),
    "Rope style": arg(lambda _, value: kvd_client.Rope([1.0], value)),
    "LeaseWish tokens": arg(lambda _, value: kvd_client.LeaseWish(value), "0"),
    "LeaseWish policy": arg(lambda _, value: kvd_client.LeaseWish(policy=value)),
    "LeaseWish prefix": arg(lambda _, value: kvd_client.LeaseWish(prefix=value), "empty list"),
    "LeaseWish lease_ahead": arg(lambda _, value: kvd_client.LeaseWish(lease_ahead=value), "0"),
    "KVSpec.from_hf": arg(lambda _, value: kvd_client.KVSpec.from_hf(value)),
    "Async": arg(lambda _, value: kvd_client.aio.Async(value)),
}
CLIENT = {
    "connect endpoint": arg(lambda t, value: connected(t, endpoint=value), "None", *TEXTS),
    "connect device": arg(lambda t, value: connected(t, device=value), "None", "text"),
    "connect name": arg(lambda t, value: connected(t, name=value), "None", "text with zero", *TEXTS),
    "connect timeout": arg(lambda t, value: connected(t, timeout=value), *TIMES),
    "pool name": arg(attached, "text"),
    "pool spec": arg(lambda t, value: t.client.pool(t.pool.name, value), "None"),
    "pool blocks": arg(lambda t, value: t.client.pool(t.pool.name, t.pool.spec, value), "0"),
    "pool read_only": arg(lambda t, value: t.client.pool(t.pool.name, read_only=value), "True", "False"),
    "events.get": arg(lambda t, value: t.client.events.get(value), "0", skips=TIMES),
    "offers.get": arg(lambda t, value: t.client.offers.get(value), "0", skips=TIMES),
}
POOL = {
    "layer index": arg(lambda t, value: t.pool.layer(value), "0"),
    "layer framework": arg(lambda t, value: t.pool.layer(0, value)),
    "write layer": arg(lambda t, value: t.pool.write(value, [16], ROWS, ROWS), "0"),
    "write slots": arg(lambda t, value: t.pool.write(0, value, ROWS, ROWS)),
    "write k": arg(lambda t, value: t.pool.write(0, [16], value, ROWS)),
    "write v": arg(lambda t, value: t.pool.write(0, [16], ROWS, value)),
    "gather layer": arg(lambda t, value: t.pool.gather(value, [16]), "0"),
    "gather slots": arg(lambda t, value: t.pool.gather(0, value), "empty list"),
    "gather framework": arg(lambda t, value: t.pool.gather(0, [16], value)),
    "lease tokens": arg(lambda t, value: t.pool.lease(value).release(), "0"),
    "lease policy": arg(lambda t, value: t.pool.lease(policy=value).release(), "None"),
    "lease prefix": arg(lambda t, value: t.pool.lease(prefix=value).release(), "empty list"),
    "lease lease_ahead": arg(lambda t, value: t.pool.lease(lease_ahead=value).release(), "0"),
    "lease wait": arg(lambda t, value: t.pool.lease(wait=value).release(), "0", *TIMES),
    "lease_many wait": arg(lambda t, value: t.pool.lease_many([], value), "0", *TIMES),
    "lease_many": arg(lambda t, value: t.pool.lease_many(value), "empty list"),
    "extend_many leases": arg(lambda t, value: t.pool.extend_many(value, [1])),
    "extend_many tokens": arg(lambda t, value: t.pool.extend_many([t.lease], value), "generator"),
    "extend_many wait": arg(lambda t, value: t.pool.extend_many([t.lease], [1], value), "0", *TIMES),
    "release_many": arg(lambda t, value: t.pool.release_many(value), "empty list"),
    "lease prompt": arg(lambda t, value: t.pool.lease(prompt=value).release(), "None", "empty list"),
    "lease namespace": arg(
        lambda t, value: t.pool.lease(prompt=[1], namespace=value).release(), "text with zero", *TEXTS
    ),
    "match hashes": arg(lambda t, value: t.pool.match(value), "empty list"),
    "match ttl": arg(lambda t, value: t.pool.match([b"h" * 32], value), *TIMES),
    "adopt key": arg(lambda t, value: adopting(t, value), "text with zero", "text"),
    "adopt wait": arg(lambda t, value: adopting(t, "key", value), "0", *TIMES),
    "pin": arg(lambda t, value: t.pool.pin(value)),
}
LEASE = {
    "slot_mapping start": arg(lambda t, value: t.lease.slot_mapping(value, 1), "0"),
    "slot_mapping stop": arg(lambda t, value: t.lease.slot_mapping(0, value), "0"),
    "lease.gather layer": arg(lambda t, value: t.lease.gather(value), "0"),
    "lease.gather framework": arg(lambda t, value: t.lease.gather(0, value)),
    "extend": arg(lambda t, value: t.lease.extend(value), "0"),
    "extend wait": arg(lambda t, value: t.lease.extend(1, value), "0", *TIMES),
    "commit": arg(lambda t, value: t.lease.commit(value), "0"),
    "fork": arg(lambda t, value: t.lease.fork(value)),
    "compress park": arg(
        lambda t, value: t.lease.compress(SNAP, QUERIES, park=value), skips=("True", "False")
    ),
    "restore wait": arg(lambda t, value: t.lease.restore(value), skips=["0", *TIMES]),
    "restore timeout": arg(lambda t, value: t.lease.restore(timeout=value), skips=["None", *TIMES]),
    "suspend timeout": arg(lambda t, value: t.lease.suspend(value), skips=["None", *TIMES]),
    "resume wait": arg(lambda t, value: t.lease.resume(value), skips=["0", *TIMES]),
    "resume timeout": arg(lambda t, value: t.lease.resume(timeout=value), skips=["None", *TIMES]),
    "publish key": arg(lambda t, value: t.lease.publish(value), skips=["text", "text with zero"]),
    "publish ttl": arg(lambda t, value: t.lease.publish("key", value), skips=TIMES),
    "transfer session_id": arg(lambda t, value: t.lease.transfer(value), skips=["text", "text with zero"]),
    "seal": arg(lambda t, value: t.lease.seal(value), "empty list"),
    "compress policy": arg(lambda t, value: t.lease.compress(value, QUERIES), "None"),
    "compress queries": arg(lambda t, value: t.lease.compress(SNAP, value)),
    "compress row_lse": arg(lambda t, value: t.lease.compress(SNAP, QUERIES, value), skips=["None"]),
    "compress rope": arg(lambda t, value: t.lease.compress(SNAP, QUERIES, rope=value), skips=["None"]),
    "compress timeout": arg(
        lambda t, value: t.lease.compress(SNAP, QUERIES, timeout=value), skips=["None", *TIMES]
    ),
    "observe queries": arg(lambda t, value: t.lease.observe(value)),
    "observe row_lse": arg(lambda t, value: t.lease.observe(QUERIES, value), skips=["None"]),
    "observe timeout": arg(lambda t, value: t.lease.observe(QUERIES, timeout=value), skips=["None", *TIMES]),
}
ARGUMENTS = POLICIES | SPECS | VALUES | CLIENT | POOL | LEASE


@pytest.fixture
def things(
    client: kvd_client.Client,
    new_pool: NewPool,
    spec: kvd_client.KVSpec,
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A client, a pool, and a lease of 40 tokens in use."""
    monkeypatch.setenv("KVD_ENDPOINT", str(daemon.run_dir))
    pool = new_pool(spec, 16)
    lease = pool.lease(tokens=48)
    lease.extend(40)
    lease.commit(40)
    return SimpleNamespace(client=client, pool=pool, lease=lease, run_dir=daemon.run_dir, daemon=daemon)


def standing(things: Any) -> Any:
    """What may not change: the lease, and what the pool has given."""
    lease, status = things.lease, things.daemon.pool_status(things.pool.name)
    table = lease.block_table.tolist()
    slots = (lease.length, lease.position, lease.generation, lease.sealed_blocks, table)
    return slots, (status.leases, status.blocks_leased, status.compressions), things.pool.layer(0)[0].sum()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_odd_value_is_refused_by_name_and_changes_nothing(things: Any, name: str) -> None:
    before, argument = standing(things), ARGUMENTS[name]
    refusals = {
        odd: outcome(argument, things, value)
        for odd, value in odd_values().items()
        if odd not in argument.skips
    }
    assert {odd for odd, text in refusals.items() if text is None} <= argument.takes
    assert [text for text in refusals.values() if text and (len(text) > 500 or "\n" in text)] == []
    assert standing(things) == before


def outcome(argument: Argument, things: Any, value: Any) -> str | None:
    """The refusal's text; None if the value was taken."""
    try:
        argument.call(things, value)
    except kvd_client.InvalidArgumentError as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("shape", [(1, 2, 16), (2, 8, 4, 16)])
def test_another_frameworks_tensor_is_refused_with_the_way_to_pass_it(things: Any, shape: Any) -> None:
    foreign = Foreign(shape)
    for call in (
        lambda: things.pool.write(0, [16], foreign, foreign),
        lambda: things.lease.compress(SNAP, foreign),
        lambda: things.lease.observe(foreign),
    ):
        with pytest.raises(kvd_client.InvalidArgumentError, match="from_dlpack"):
            call()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_keys_of_no_float_type_are_refused(things: Any, dtype: torch.dtype) -> None:
    rows = torch.zeros(1, 2, 16, dtype=dtype)
    with pytest.raises(kvd_client.InvalidArgumentError, match="a float type is needed"):
        things.pool.write(0, [16], rows, rows)


def test_numpys_integers_are_integers_everywhere(things: Any) -> None:
    four = np.int32(4)
    policy = kvd_client.Streaming(four, four)
    assert policy == kvd_client.Streaming(4, 4)
    assert kvd_client.Keep.of(four) == kvd_client.Keep.of(4)
    assert kvd_client.Keep.of(np.float32(0.15)) == kvd_client.Keep.of(0.15)
    spec = kvd_client.KVSpec(four, four, four)
    assert spec.fingerprint() == kvd_client.KVSpec(4, 4, 4).fingerprint()
    with things.pool.lease(np.uint8(16), policy) as lease:
        assert lease.extend(four).tolist() == lease.slot_mapping(np.int64(0), four).tolist()
        lease.commit(torch.tensor(4))
        assert lease.length == 4


def test_leases_of_others_and_leases_named_twice_are_refused(
    things: Any, new_pool: NewPool, spec: kvd_client.KVSpec, daemon: Daemon
) -> None:
    before = standing(things)
    other_pool = new_pool(spec, 4).lease(16)
    with kvd_client.connect(daemon.run_dir) as other_client:
        other = other_client.pool(things.pool.name).lease(16)
        for leases in ([other], [other_pool], [things.lease, things.lease]):
            for call in (things.pool.release_many, lambda leases: things.pool.extend_many(leases, [1] * 2)):
                with pytest.raises(kvd_client.InvalidArgumentError, match=r"none of this client|named twice"):
                    call(leases)
        other.release()
    other_pool.release()
    assert standing(things) == before


def test_a_number_for_each_lease_is_needed(things: Any) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="2 numbers of tokens for 1 leases"):
        things.pool.extend_many([things.lease], [1, 2])


def test_async_leases_go_by_position_and_by_name(things: Any) -> None:
    import asyncio

    pool = kvd_client.aio.Async(things.pool)

    async def story() -> None:
        leases = await pool.lease_many([kvd_client.LeaseWish(16)] * 2)
        slots = await pool.extend_many(leases=tuple(leases), tokens=[1, 2])
        assert [row.size for row in slots] == [1, 2]
        await pool.release_many(leases)

    asyncio.run(story())
