"""Prefix hashes, matches and pins, as workers use them."""

import asyncio
import hashlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.running_kvd import PATIENCE_S, eventually

import kvd_client
import kvd_client.aio
from kvd_client import LeaseWish, prefix

from .daemon import Daemon

PROMPT = list(range(100, 180))  # five blocks of 16
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def fill(lease: kvd_client.Lease, start: int, stop: int) -> None:
    """Compute tokens [start, stop): their bytes are their numbers."""
    slots = lease.extend(stop - start)
    rows = torch.arange(start, stop, dtype=torch.float32)[:, None, None].expand(-1, 2, 16)
    for layer in range(2):
        lease.write(layer, slots, rows, -rows)
    lease.commit(stop - start)


def tokens_of(lease: kvd_client.Lease) -> list[float]:
    k, v = lease.gather(1, "numpy")
    assert (k == -v).all()
    return [float(each) for each in k[:, 0, 0]]


# -- hashes -----------------------------------------------------------------------------------


@given(TOKENS, st.integers(1, 20), st.text(max_size=5))
def test_a_blocks_hash_is_of_the_hash_before_it_and_its_token_ids(tokens, block_size, namespace) -> None:
    before = hashlib.sha256(b"kvd prefix 1\0" + namespace.encode(errors="ignore")).digest()
    expected = []
    for at in range(0, len(tokens) // block_size * block_size, block_size):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + block_size])
        before = hashlib.sha256(before + ids).digest()
        expected.append(before)
    namespace = namespace.encode(errors="ignore").decode()
    assert prefix.hashes(tokens, block_size, namespace) == expected


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, torch.tensor, tuple])
def test_hashes_are_the_same_for_every_kind_of_row(kind) -> None:
    row = kind(PROMPT) if kind in (torch.tensor, tuple) else np.array(PROMPT, kind)
    assert prefix.hashes(row, 16) == prefix.hashes(PROMPT, 16)


def test_hashes_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    program = f"from kvd_client import prefix; print(prefix.hashes({PROMPT}, 16, 'ns')[-1].hex())"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }
    assert said == {prefix.hashes(PROMPT, 16, "ns")[-1].hex()}


def test_one_token_another_namespace_or_block_size_make_all_later_hashes_others() -> None:
    base = prefix.hashes(PROMPT, 16)
    changed = prefix.hashes([*PROMPT[:20], 7, *PROMPT[21:]], 16)
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)
    assert not set(prefix.hashes(PROMPT, 16, "adapter")) & set(base)
    assert not set(prefix.hashes(PROMPT, 8)) & set(base)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], [[1, 2]], "text", None])
def test_what_is_no_row_of_token_ids_is_refused(tokens) -> None:
    with pytest.raises(kvd_client.InvalidArgumentError, match="token"):
        prefix.hashes(tokens, 16)


# -- matches ----------------------------------------------------------------------------------


def test_a_second_prompt_computes_only_what_no_one_computed_before(new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease(prompt=PROMPT) as first:
        assert (first.prefix_tokens, first.capacity) == (0, 80)
        fill(first, 0, 80)
        first.seal_prompt()
        with pool.lease(prompt=PROMPT) as second:
            assert second.prefix_tokens == second.length == 64  # a model has to see one token at least
            fill(second, 64, 80)
            assert tokens_of(second) == tokens_of(first)
            second.seal_prompt()
            assert second.block_table.tolist() == first.block_table.tolist()
    with pool.lease(prompt=[*PROMPT[:40], 5, *PROMPT[41:]]) as third:
        assert third.prefix_tokens == 32
        assert tokens_of(third) == [float(number) for number in range(32)]


def test_another_namespace_finds_nothing(new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease(prompt=PROMPT, namespace="base") as lease:
        fill(lease, 0, 80)
        lease.seal_prompt()
    assert len(pool.match(prefix.hashes(PROMPT, 16, "base"))) == 5
    assert len(pool.match(prefix.hashes(PROMPT, 16, "base+adapter"))) == 0
    with pool.lease(prompt=PROMPT) as other:
        assert other.prefix_tokens == 0


def test_a_prompt_can_be_sealed_as_it_is_written(new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease(prompt=PROMPT) as lease:
        for start in range(0, 80, 20):
            fill(lease, start, start + 20)
            lease.seal_prompt()
            assert lease.sealed_blocks == (start + 20) // 16
    with pool.lease() as lease, pytest.raises(kvd_client.InvalidArgumentError, match="without a prompt"):
        lease.seal_prompt()


def sealed(pool: kvd_client.Pool, tokens: list[int]) -> list[bytes]:
    """Hashes of what is cached of these tokens now."""
    with pool.lease(prompt=tokens) as lease:
        fill(lease, lease.length, len(tokens))
        lease.seal_prompt()
    return prefix.hashes(tokens, 16)


def test_a_match_keeps_its_blocks_until_it_is_released(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec, 8)
    hashes = sealed(pool, PROMPT)
    with pool.match([*hashes, b"?" * 32]) as match:
        assert (len(match), match.tokens) == (5, 80)
        assert daemon.pool_status(pool.name).blocks_pinned == 5
        with pytest.raises(kvd_client.PoolExhaustedError):
            pool.lease(tokens=16 * 4)
    with pool.lease(tokens=16 * 4):
        assert len(pool.match(hashes)) == 4
    match.release()


def test_a_lease_takes_a_match_with_what_follows_it_in_one_call(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec, 8)
    hashes = sealed(pool, PROMPT)
    with pool.match(hashes) as match, pool.lease(tokens=16 * 8, prefix=match) as lease:
        assert (lease.prefix_tokens, lease.sealed_blocks, lease.block_table.size) == (80, 5, 8)
        assert tokens_of(lease) == [float(number) for number in range(80)]
        assert daemon.pool_status(pool.name).blocks_pinned == 0
        with pytest.raises(kvd_client.PinNotFoundError, match="a lease took it"):
            pool.lease(prefix=match)


def test_matches_of_several_leases_are_taken_in_one_call(new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = sealed(pool, PROMPT)
    wishes = [LeaseWish(tokens=90, prefix=pool.match(hashes[:count])) for count in (5, 3, 0)]
    leases = pool.lease_many(wishes)
    assert [lease.prefix_tokens for lease in leases] == [80, 48, 0]
    assert leases[0].block_table[:3].tolist() == leases[1].block_table[:3].tolist()


def test_a_match_ends_at_its_time_and_the_lease_that_needs_it_says_so(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = sealed(pool, PROMPT)
    match = pool.match(hashes, ttl=0.001)
    eventually(lambda: not daemon.pins(pool.name), "the match to end")
    with pytest.raises(kvd_client.PinNotFoundError, match="match again"):
        pool.lease(prefix=match)
    with pytest.raises(kvd_client.InvalidArgumentError, match="60 s"):
        pool.match(hashes, ttl=61.0)


def test_a_prompts_lease_goes_on_when_its_match_ends_while_it_waits_for_blocks(
    daemon: Daemon, new_pool, spec
) -> None:
    """The match is ended by an operator, as its time would; the lease has stood in line meanwhile."""
    pool = new_pool(spec, 8)
    sealed(pool, PROMPT)
    filler = pool.lease(tokens=16 * 3)
    waiting: list[kvd_client.Lease] = []
    thread = threading.Thread(target=lambda: waiting.append(pool.lease(16 * 8, prompt=PROMPT, wait=60.0)))
    thread.start()
    eventually(lambda: daemon.pool_status(pool.name).waiting_calls, "the lease to stand in line")
    [pin] = daemon.pins(pool.name)
    daemon.drop_pin(pin.pin_id)
    filler.release()
    thread.join(PATIENCE_S)
    [lease] = waiting
    assert (lease.prefix_tokens, lease.block_table.size) == (64, 8)
    assert daemon.pins(pool.name) == []


def test_a_session_that_ends_takes_its_matches_with_it(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = sealed(pool, PROMPT)
    with kvd_client.connect(daemon.run_dir) as other:
        other.pool(pool.name).match(hashes, ttl=60.0)
        assert [pin.session_id for pin in daemon.pins(pool.name)] == [other.session_id]
    assert daemon.pins(pool.name) == []


def test_matches_of_others_cannot_be_taken(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    match = pool.match(sealed(pool, PROMPT))
    with kvd_client.connect(daemon.run_dir) as other:
        theirs = other.pool(pool.name)
        for call in (lambda: theirs.lease(prefix=match), lambda: theirs.unpin(match.pin_id)):
            with pytest.raises(kvd_client.PinNotFoundError):
                call()
    assert len(daemon.pins(pool.name)) == 1


def test_without_a_budget_nothing_can_be_pinned_for_good(new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = sealed(pool, PROMPT)
    with pytest.raises(kvd_client.QuotaExceededError, match="none is given by default"):
        pool.pin(hashes)


def test_asyncio_has_the_same_matches(new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = sealed(pool, PROMPT)

    async def story() -> None:
        pool_ = kvd_client.aio.Async(pool)
        async with await pool_.match(hashes) as match, await pool_.lease(90, prefix=match) as lease:
            assert lease.prefix_tokens == 80
        async with await pool_.lease(prompt=PROMPT) as lease:
            assert lease.prefix_tokens == 64
            await lease.seal_prompt()

    asyncio.run(story())
