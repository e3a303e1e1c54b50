"""A model on a leased cache answers what it answers on transformers' own, to the last bit."""

import os
import signal

import pytest
import torch

from kvd_client import InvalidArgumentError
from kvd_client.hf import KvdCache

from .tiny import BLOCK_SIZE, dynamic_cache, forward, generate, in_steps, some_ids

STEPS = (29, 1, 1, 10, 1)  # prefill, decode steps, an append of several tokens


@pytest.fixture(params=["block_outermost", "layer_outermost"])
def any_pool(request, make_pool):
    return make_pool(layout=request.param)


@pytest.fixture(params=["plain", "attached"])
def any_model(request):
    return request.getfixturevalue(request.param)


def scattered_lease(pool):
    """A lease whose blocks do not all follow each other in the pool."""
    lease, others = pool.lease(lease_ahead=0), []
    for blocks in range(1, 6):
        lease.extend(blocks * BLOCK_SIZE)
        others.append(pool.lease(BLOCK_SIZE))
    pool.release_many(others)
    assert (lease.block_table[1:] - lease.block_table[:-1] != 1).any()
    return lease


@pytest.mark.parametrize("scattered", [False, True])
def test_logits_are_those_of_a_dynamic_cache(any_pool, any_model, plain, scattered):
    ids = some_ids(sum(STEPS))
    lease = scattered_lease(any_pool) if scattered else any_pool.lease()
    leased = in_steps(any_model, ids, KvdCache(lease), STEPS)
    assert torch.equal(leased, in_steps(plain, ids, dynamic_cache(plain), STEPS))
    assert (lease.length, lease.position) == (sum(STEPS), sum(STEPS))


def test_generate_goes_on_as_without_kvd(any_pool, any_model, plain):
    ids = some_ids(21)
    cache = KvdCache(any_pool.lease())
    assert torch.equal(generate(any_model, ids, 20, cache), generate(plain, ids, 20))
    assert cache.get_seq_length() == 40  # the last token is not fed back


def test_generate_takes_a_prompt_in_chunks_as_without_kvd(pool, attached, plain):
    ids = some_ids(33)
    expected = generate(plain, ids, 9, dynamic_cache(plain), prefill_chunk_size=10)
    assert torch.equal(generate(attached, ids, 9, KvdCache(pool.lease()), prefill_chunk_size=10), expected)


def test_a_second_turn_continues_on_the_same_cache(pool, attached, plain):
    cache = KvdCache(pool.lease())
    first = generate(attached, some_ids(12), 5, cache)
    second = torch.cat((first, some_ids(7, seed=1)), dim=1)
    assert torch.equal(generate(attached, second, 6, cache), generate(plain, second, 6))


def test_a_shared_prefix_is_read_where_it_lies(pool, attached, plain):
    ids = some_ids(3 * BLOCK_SIZE + 5)
    with pool.lease() as first:
        expected = in_steps(attached, ids, KvdCache(first), (3 * BLOCK_SIZE, 5))
        hashes = [bytes([block]) * 32 for block in range(3)]
        first.seal(hashes)
        with pool.lease(prefix=hashes) as second:
            assert second.block_table[:3].tolist() == first.block_table[:3].tolist()
            again = forward(attached, ids[:, 3 * BLOCK_SIZE :], KvdCache(second))
    assert torch.equal(again, expected[:, 3 * BLOCK_SIZE :])


def test_a_bfloat16_pool_under_a_float32_model_rounds_keys_and_values_once(make_pool, attached, plain):
    ids = some_ids(24)
    rounded = in_steps(attached, ids, KvdCache(make_pool(dtype="bfloat16").lease()), (20, 4))
    error = (rounded - forward(plain, ids)).abs().max()
    assert 0 < error < 0.05


def test_a_forward_pass_that_broke_off_leaves_no_trace(pool, attached, plain):
    ids, cache = some_ids(20), KvdCache(pool.lease())
    forward(attached, ids[:, :10], cache)

    def fail(*_):
        raise RuntimeError("the second layer fails")

    hook = attached.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="second layer"):
        forward(attached, ids[:, 10:15], cache)
    hook.remove()
    assert cache.get_seq_length() == 10
    expected = in_steps(plain, ids, dynamic_cache(plain), (10, 10))
    assert torch.equal(forward(attached, ids[:, 10:], cache), expected[:, 10:])


def test_steps_inside_a_block_do_not_ask_the_daemon(shared_kvd, pool, attached):
    cache = KvdCache(pool.lease(2 * BLOCK_SIZE))
    forward(attached, some_ids(BLOCK_SIZE), cache)
    daemon = shared_kvd.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)
    try:
        in_steps(attached, some_ids(BLOCK_SIZE), cache, (1,) * BLOCK_SIZE)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert cache.lease.position == 2 * BLOCK_SIZE


def test_two_sequences_at_once_are_refused_with_the_way_out(pool, attached):
    with pytest.raises(InvalidArgumentError, match="a lease holds one sequence"):
        forward(attached, some_ids(4).repeat(2, 1), KvdCache(pool.lease()))


def test_a_pool_of_another_geometry_is_refused(client, attached):
    from kvd_client import KVSpec

    other = client.pool("other", KVSpec(3, 4, 16, "float32", block_size=8), 8)
    with pytest.raises(InvalidArgumentError, match=r"\(1, 2, 16, 16\), the leases have \(1, 4, 16, 16\)"):
        forward(attached, some_ids(4), KvdCache(other.lease()))


def test_an_fp8_pool_is_refused(make_pool):
    with pytest.raises(InvalidArgumentError, match="use a bfloat16 or float32 pool"):
        KvdCache(make_pool(dtype="fp8").lease())


@pytest.mark.parametrize(
    "operation", ["crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave"]
)
def test_what_a_lease_cannot_do_says_so(pool, attached, operation):
    cache = KvdCache(pool.lease())
    forward(attached, some_ids(9), cache)
    with pytest.raises(InvalidArgumentError, match="a new lease for a new sequence"):
        getattr(cache, operation)(1)


def test_beams_are_refused(pool, attached):
    with pytest.raises(InvalidArgumentError, match="one sequence"):
        generate(attached, some_ids(9), 4, KvdCache(pool.lease()), num_beams=2)
