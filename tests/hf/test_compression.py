"""Compression from inside the model: the right queries vote, at the right moment, and decoding goes on."""

from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvd_client import H2O, Dual, InvalidArgumentError, SnapKV, Span
from kvd_client.hf import KvdCache

from .reference import causal, turned
from .tiny import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    dynamic_cache,
    forward,
    generate,
    in_steps,
    some_ids,
    tiny_model,
)

PROMPT = 67
POLICIES = {
    "snapkv": SnapKV(window=8, kernel=5, keep=0.4),
    "dual": Dual(window=8, kernel=5, keep=0.4),
    "span by token": Span(window=8, kernel=7, keep=0.4),
    "span by block": Span(window=8, kernel=7, keep=0.4, granularity="block"),
    "h2o": H2O(recent=8, keep=0.4),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(scope="module")
def masked():
    """The tiny model with an attention that hides all prompt tokens but those in `model.kept`
    [layers, kv_heads, kept] from later ones."""
    model = tiny_model()

    def attention(module, query, key, value, attention_mask, **others):
        old = key.shape[2] - query.shape[2]
        hidden = torch.ones(KV_HEADS, key.shape[2], dtype=torch.bool)
        hidden[:, PROMPT:] = False
        hidden.scatter_(1, model.kept[module.layer_idx].long(), False)
        seen = causal(key.shape[2])[old:] & ~hidden.repeat_interleave(HEADS // KV_HEADS, 0)[:, None]
        return sdpa_attention_forward(module, query, key, value, seen[None], **others)

    AttentionInterface.register("kept_only", attention)
    return model


def independent_queries(model, ids: torch.Tensor, window: int) -> torch.Tensor:
    """[layers, window, heads, head_dim] after the rotary embedding, taken from the projections' outputs."""
    rows: list[torch.Tensor] = []
    projections = [layer.self_attn.q_proj for layer in model.model.layers]
    hooks = [each.register_forward_hook(lambda *seen: rows.append(seen[2])) for each in projections]
    forward(model, ids)
    for hook in hooks:
        hook.remove()
    positions, inv_freq = torch.arange(ids.shape[1]), model.model.rotary_emb.inv_freq
    heads = [turned(each[0].view(-1, HEADS, HEAD_DIM), positions, inv_freq) for each in rows]
    return torch.stack(heads)[:, -window:].float()


def prefilled(pool, model, ids, policy, steps=None):
    """A cache that is compressed after `ids`."""
    when = "when_asked" if steps else "after_prefill"
    cache = KvdCache(pool.lease(policy=policy), compress=when)
    logits = in_steps(model, ids, cache, steps or (ids.shape[1],))
    if steps:
        cache.compress()
    return cache, logits


@every_policy
def test_the_prefill_itself_reads_everything(pool, attached, plain, policy):
    ids = some_ids(PROMPT)
    cache, logits = prefilled(pool, attached, ids, policy)
    assert torch.equal(logits, forward(plain, ids))
    (report,) = cache.reports
    assert report.tokens_before == PROMPT
    assert cache.lease.block_table.size == report.blocks_after < report.blocks_before


@every_policy
def test_what_follows_sees_the_kept_tokens_and_no_others(pool, attached, masked, policy):
    ids, later = some_ids(PROMPT), some_ids(11, seed=1)
    cache, _ = prefilled(pool, attached, ids, policy)
    masked.kept = torch.from_numpy(cache.lease.kept_positions())
    assert masked.kept.shape[2] == cache.lease.length < PROMPT
    after = in_steps(attached, later, cache, (1, 1, 6, 1, 2))
    reference = dynamic_cache(masked)
    masked.set_attn_implementation("sdpa")
    forward(masked, ids, reference)
    masked.set_attn_implementation("kept_only")
    torch.testing.assert_close(after, forward(masked, later, reference), rtol=0, atol=1e-5)
    assert cache.get_seq_length() == PROMPT + 11


@pytest.mark.parametrize("name", ["snapkv", "dual", "span by token", "span by block"])
@pytest.mark.parametrize("steps", [None, (40, 27), (62, 5), (*(9,) * 7, 4)], ids=str)
def test_the_window_is_that_of_the_prompts_last_queries(pool, attached, plain, name, steps):
    """However the prompt was cut into forward passes."""
    ids, policy = some_ids(PROMPT), POLICIES[name]
    cache, _ = prefilled(pool, attached, ids, policy, steps)
    other = KvdCache(pool.lease(policy=policy))
    forward(attached, ids, other)
    other.lease.compress(queries=independent_queries(plain, ids, policy.window))
    assert (cache.lease.kept_positions() == other.lease.kept_positions()).all()


@pytest.mark.parametrize("steps", [(PROMPT,), (40, 27), (30, *(1,) * 37)], ids=str)
def test_h2o_adds_up_every_querys_attention(pool, attached, plain, steps):
    """However the prompt was cut; ranked by the column sums of the attention itself."""
    ids, policy = some_ids(PROMPT), POLICIES["h2o"]
    cache, _ = prefilled(pool, attached, ids, policy, steps)
    kept = cache.lease.kept_positions()
    sums = attention_sums(plain, ids)
    middle = sums[..., policy.sinks : PROMPT - policy.recent]
    heavy = middle.topk(kept.shape[2] - policy.sinks - policy.recent).indices + policy.sinks
    expected = heavy.sort(dim=-1).values.numpy()
    assert (kept[..., policy.sinks : -policy.recent] == expected).all()


def attention_sums(model, ids: torch.Tensor) -> torch.Tensor:
    """[layers, kv_heads, tokens]: what each token got of all queries of its group."""
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    grouped = torch.stack(attentions)[:, 0].view(LAYERS, KV_HEADS, HEADS // KV_HEADS, PROMPT, PROMPT)
    return grouped.sum((2, 3))


@every_policy
def test_generate_compresses_after_the_prompt_and_goes_on(pool, attached, policy):
    cache = KvdCache(pool.lease(policy=policy), compress="after_prefill")
    generated = generate(attached, some_ids(PROMPT), 3 * BLOCK_SIZE, cache)
    assert generated.shape[1] == PROMPT + 3 * BLOCK_SIZE
    assert len(cache.reports) == 1
    assert cache.lease.position - cache.lease.length == PROMPT - cache.reports[0].tokens_kept


@pytest.mark.parametrize("name", ["dual", "span by token", "span by block", "h2o"])
def test_a_bounded_cache_is_cut_once_a_block_however_long_it_generates(pool, attached, name):
    policy = replace(POLICIES[name], keep=40)
    with pool.lease(policy=policy) as lease:
        cache = KvdCache(lease, compress="bounded")
        generate(attached, some_ids(20), 200, cache)
        assert lease.position == 219
        assert lease.length < 40 + BLOCK_SIZE
        assert lease.block_table.size <= 40 // BLOCK_SIZE + 3
        assert 15 <= len(cache.reports) <= 180 // BLOCK_SIZE
        window = policy.recent if name == "h2o" else policy.window
        newest = lease.kept_positions()[..., -window:]
        assert (newest == torch.arange(219 - window, 219).numpy()).all()


def test_a_bound_is_a_number_of_tokens(pool):
    with pytest.raises(InvalidArgumentError, match="keep=512"):
        KvdCache(pool.lease(policy=POLICIES["dual"]), compress="bounded")


@pytest.mark.parametrize(
    "policy", [Dual(window=30, keep=32), Span(window=10, keep=16, granularity="block")], ids=str
)
def test_a_bound_below_sinks_and_window_is_refused_before_anything_runs(pool, policy):
    with pytest.raises(InvalidArgumentError, match="sinks and window alone need"):
        KvdCache(pool.lease(), compress="bounded", policy=policy)


def test_queries_of_one_cache_serve_another_lease_of_the_same_tokens(pool, attached):
    ids, policy = some_ids(PROMPT), POLICIES["snapkv"]
    first, _ = prefilled(pool, attached, ids, policy, (PROMPT,))
    second = KvdCache(pool.lease(policy=policy))
    forward(attached, ids, second)
    second.lease.compress(queries=first.window_queries())
    assert (second.lease.kept_positions() == first.lease.kept_positions()).all()


def test_a_prompt_shorter_than_the_window_stays_whole(pool, attached):
    cache, _ = prefilled(pool, attached, some_ids(7), Dual(window=32, kernel=5, keep=0.5))
    assert cache.reports[0].unchanged
    assert cache.lease.length == 7


@pytest.mark.parametrize("tokens", [13, 20, 40])
@pytest.mark.parametrize("name", ["snapkv", "dual", "span by token", "span by block", "h2o"])
def test_a_prompt_too_short_for_sinks_window_and_share_stays_whole_and_goes_on(pool, attached, name, tokens):
    policy = replace(POLICIES[name], keep=0.1, sinks=4)
    policy = replace(policy, **{"recent" if name == "h2o" else "window": 8})
    ids = some_ids(tokens)
    with pytest.raises(InvalidArgumentError, match="sinks and window alone need"):
        policy.target_tokens(tokens, BLOCK_SIZE)
    with pool.lease(policy=policy) as lease:
        cache = KvdCache(lease, compress="after_prefill")
        generate(attached, ids, 5, cache)
        (report,) = cache.reports
        assert (report.unchanged, report.tokens_kept, report.blocks_freed) == (True, tokens, 0)
        assert lease.length == lease.position == tokens + 4


def test_after_a_shared_prefix_fewer_queries_vote(pool, attached):
    ids = some_ids(PROMPT)
    hashes = [bytes([block]) * 32 for block in range(8)]
    first = pool.lease()
    forward(attached, ids[:, : 8 * BLOCK_SIZE], KvdCache(first))
    first.seal(hashes)
    policy = Span(window=8, kernel=7, keep=0.4, granularity="block")
    cache = KvdCache(pool.lease(policy=policy, prefix=hashes), compress="after_prefill")
    forward(attached, ids[:, 8 * BLOCK_SIZE :], cache)
    (report,) = cache.reports
    assert report.blocks_after < report.blocks_before
    assert not report.out_of_place
    assert first.block_table.size >= 8  # the other reader's blocks are untouched


def test_a_policy_may_be_named_for_the_cache_alone(pool, attached):
    cache = KvdCache(pool.lease(), compress="after_prefill", policy=POLICIES["snapkv"])
    forward(attached, some_ids(PROMPT), cache)
    assert cache.reports[0].tokens_kept < PROMPT


def test_compressing_a_dense_lease_is_refused(pool):
    with pytest.raises(InvalidArgumentError, match="dense has nothing to compress"):
        KvdCache(pool.lease(), compress="after_prefill")


def test_a_cache_that_kept_no_queries_says_how_to_make_one(pool, attached):
    cache = KvdCache(pool.lease(policy=POLICIES["snapkv"]))
    forward(attached, some_ids(PROMPT), cache)
    with pytest.raises(InvalidArgumentError, match='"when_asked"'):
        cache.compress()


def test_compression_without_attach_is_refused(pool, plain):
    cache = KvdCache(pool.lease(policy=POLICIES["snapkv"]), compress="after_prefill")
    with pytest.raises(InvalidArgumentError, match=r"attach\(model\)"):
        forward(plain, some_ids(PROMPT), cache)
