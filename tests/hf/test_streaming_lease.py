"""A streaming lease shows sinks and a window, exactly, in constant memory."""

import pytest
import torch

from kvd_client import ConflictError, InvalidArgumentError, Streaming
from kvd_client.hf import KvdCache, attach

from .reference import sinks_and_window, streaming_llm
from .tiny import BLOCK_SIZE, ROPE_TABLE, forward, generate, in_steps, some_ids, tiny_model

TOKENS = 90
SHAPES = [(4, 13), (8, 16), (0, 9), (3, 40)]  # sinks, window; a block is 8 tokens
STEPS = {
    "one by one": (1,) * TOKENS,
    "a prompt, then one by one": (30, *(1,) * (TOKENS - 30)),
    "sevens": (*(7,) * 12, 6),
    "appends beyond the window": (50, 40),
    "a prompt beyond sinks and window": (TOKENS,),
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("sinks", "window"), SHAPES)
def test_each_token_sees_the_sinks_and_its_own_window(pool, attached, plain, sinks, window, steps):
    ids = some_ids(TOKENS)
    policy = Streaming(sinks, window)
    with pool.lease(policy=policy) as lease:
        streamed = in_steps(attached, ids, KvdCache(lease), steps)
        assert lease.position == TOKENS
        assert lease.block_table.size == policy.capacity_blocks(BLOCK_SIZE)
    mask = sinks_and_window(TOKENS, sinks, window)[None, None]
    torch.testing.assert_close(streamed, forward(plain, ids, attention_mask=mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("sinks", "window"), SHAPES)
def test_cache_positions_are_those_of_the_published_method(pool, attached, sinks, window):
    ids = some_ids(TOKENS)
    with pool.lease(policy=Streaming(sinks, window, rope="cache")) as lease:
        streamed = in_steps(attached, ids, KvdCache(lease), (5, *(1,) * (TOKENS - 5)))
    torch.testing.assert_close(streamed, streaming_llm(attached, ids, sinks, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rope", ["original", "cache"])
def test_generate_runs_far_past_the_models_table_on_the_same_blocks(pool, attached, rope):
    with pool.lease(policy=Streaming(4, 20, rope=rope)) as lease:
        cache = KvdCache(lease)
        forward(attached, some_ids(3), cache)
        blocks = set(lease.block_table.tolist())
        generated = generate(attached, some_ids(4), 5 * ROPE_TABLE, cache)
        assert generated.shape[1] == 4 + 5 * ROPE_TABLE
        assert set(lease.block_table.tolist()) == blocks
        assert cache.get_seq_length() == lease.position == 3 + 5 * ROPE_TABLE


def test_streaming_without_attach_is_refused(pool, plain):
    with pytest.raises(InvalidArgumentError, match=r"attach\(model\)"):
        forward(plain, some_ids(4), KvdCache(pool.lease(policy=Streaming(4, 13))))


def test_a_chunk_that_broke_off_after_the_window_moved_ends_the_sequence(pool, attached):
    cache = KvdCache(pool.lease(policy=Streaming(4, 13)))
    forward(attached, some_ids(60), cache)

    def fail(*_):
        raise RuntimeError("the second layer fails")

    hook = attached.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="second layer"):
        forward(attached, some_ids(20), cache)
    hook.remove()
    with pytest.raises(ConflictError, match="prefill a new one"):
        forward(attached, some_ids(1), cache)


def test_padding_cannot_be_told_apart_once_tokens_are_dropped(pool, attached):
    cache = KvdCache(pool.lease(policy=Streaming(4, 13)))
    forward(attached, some_ids(60), cache)
    mask = torch.ones(1, 61)
    mask[0, 0] = 0
    with pytest.raises(InvalidArgumentError, match="no others can be hidden"):
        forward(attached, some_ids(1), cache, attention_mask=mask)


def test_a_rope_that_changes_with_the_length_cannot_be_renumbered(pool):
    model = tiny_model()
    model.model.rotary_emb.rope_type = "dynamic"
    attach(model)
    with pytest.raises(InvalidArgumentError, match='use rope="original"'):
        forward(model, some_ids(4), KvdCache(pool.lease(policy=Streaming(4, 13, rope="cache"))))


def test_a_model_that_does_not_use_sdpa_is_refused():
    model = tiny_model()
    model.set_attn_implementation("eager")
    with pytest.raises(InvalidArgumentError, match='attn_implementation="sdpa"'):
        attach(model)
