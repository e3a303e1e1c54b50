"""Compression end to end: what is kept, where it lies, what attention sees."""

import math

import numpy as np
import pytest
import torch

import kvd_client
from kvd_client import H2O, Dual, ExpectedAttention, KeyDiff, KVSpec, SnapKV, Span, Streaming
from kvd_cuda import reference

from .daemon import Daemon

LAYERS, KV_HEADS, QUERY_HEADS, DIM_K, DIM_V, BLOCK = 2, 2, 4, 16, 24, 16
TOKENS, WINDOW = 300, 32
LAYOUTS = ("block_outermost", "layer_outermost")
CLEAR_GAP = 1e-6  # relative; below it float32 may order two scores either way
VOTING = [
    SnapKV(window=WINDOW, keep=0.3),
    SnapKV(window=WINDOW, kernel=7, pooling="max", keep=0.3),
    Dual(window=WINDOW, keep=0.3),
    Span(window=WINDOW, kernel=21, keep=0.4),
]


def _spec(layout: str = "block_outermost", dtype: str = "float32") -> KVSpec:
    return KVSpec(
        LAYERS, KV_HEADS, head_dim_k=DIM_K, head_dim_v=DIM_V, dtype=dtype, block_size=BLOCK, layout=layout
    )


def _queries(tokens: int = WINDOW, seed: int = 7) -> torch.Tensor:
    return torch.randn(LAYERS, tokens, QUERY_HEADS, DIM_K, generator=torch.Generator().manual_seed(seed))


def _prefill(lease: kvd_client.Lease, tokens: int = TOKENS, seed: int = 3) -> tuple[list, list]:
    """Random keys and values in every layer, as the pool rounds them: float32 [tokens, heads, dim] each."""
    random = torch.Generator().manual_seed(seed)
    slots = lease.extend(tokens)
    for layer in range(LAYERS):
        k = torch.randn(tokens, KV_HEADS, DIM_K, generator=random)
        lease.pool.write(layer, slots, k, torch.randn(tokens, KV_HEADS, DIM_V, generator=random))
    lease.commit(tokens)
    gathered = [lease.gather(layer) for layer in range(LAYERS)]
    return [k.float() for k, _ in gathered], [v.float() for _, v in gathered]


def _scores(policy: SnapKV | Span, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Pooled votes [kv_heads, tokens - window] of one layer, by the oracle."""
    window = queries.shape[0]
    spans = isinstance(policy, Span)
    weights = reference.attention_weights(queries, keys)
    votes = reference.votes(weights, KV_HEADS, "max" if spans else "mean")[:, : len(keys) - window]
    return reference.pool(votes, policy.kernel, "max" if spans else policy.pooling)


def _assert_kept(lease: kvd_client.Lease, policy: SnapKV | Span, keys: list, queries: torch.Tensor) -> None:
    target = policy.target_tokens(TOKENS, BLOCK)
    positions = lease.kept_positions()
    assert positions.shape == (LAYERS, KV_HEADS, target)
    for layer in range(LAYERS):
        scores = _scores(policy, queries[layer].float().numpy(), keys[layer].numpy())
        for head in range(KV_HEADS):
            count = target - policy.sinks - queries.shape[1]
            assert reference.gap_at_cut(scores[head, policy.sinks :], count) > CLEAR_GAP
            expected = reference.keep_top(scores[head], TOKENS, target, policy.sinks)
            assert positions[layer, head].tolist() == expected


def _assert_moved_with_their_positions(lease: kvd_client.Lease, keys: list, values: list) -> None:
    positions = torch.from_numpy(lease.kept_positions().astype(np.int64))
    for layer in range(LAYERS):
        k, v = lease.gather(layer)
        for head in range(KV_HEADS):
            assert torch.equal(k[:, head].float(), keys[layer][positions[layer, head], head])
            assert torch.equal(v[:, head].float(), values[layer][positions[layer, head], head])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", VOTING, ids=str)
def test_a_vote_keeps_what_the_oracle_keeps(new_pool, policy, layout) -> None:
    pool, queries = new_pool(_spec(layout)), _queries()
    with pool.lease(policy=policy) as lease:
        keys, values = _prefill(lease)
        report = lease.compress(queries=queries)
        _assert_kept(lease, policy, keys, queries)
        _assert_moved_with_their_positions(lease, keys, values)
        assert (report.tokens_before, report.tokens_kept) == (TOKENS, lease.length)
        assert report.mass_retained.shape == (LAYERS,)
        assert ((report.mass_retained > 0) & (report.mass_retained <= 1)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_every_type_of_pool_is_scored_as_it_is_rounded(new_pool, dtype) -> None:
    pool, policy = new_pool(_spec(dtype=dtype)), Dual(window=WINDOW, keep=0.3)
    queries = _queries().to(torch.float32 if dtype == "float8_e4m3fn" else getattr(torch, dtype))
    with pool.lease(policy=policy) as lease:
        keys, values = _prefill(lease)
        lease.compress(queries=queries)
        _assert_kept(lease, policy, keys, queries)
        _assert_moved_with_their_positions(lease, keys, values)


def test_numpy_queries_and_row_log_sum_exps_lead_to_the_same_tokens(new_pool) -> None:
    pool, policy, queries = new_pool(_spec()), Dual(window=WINDOW, keep=0.3), _queries().numpy()
    kept = []
    for with_lse in (False, True):
        with pool.lease(policy=policy) as lease:
            keys, _ = _prefill(lease)
            lse = [reference.row_lse(queries[i], keys[i].numpy()) for i in range(LAYERS)]
            lease.compress(queries=queries, row_lse=np.array(lse, np.float32) if with_lse else None)
            kept.append(lease.kept_positions())
    assert np.array_equal(*kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_knows_no_question_keeps_what_the_oracle_keeps(new_pool, layout) -> None:
    pool, queries = new_pool(_spec(layout)), _queries()
    for policy in (KeyDiff(recent=WINDOW, keep=0.3), ExpectedAttention(recent=WINDOW, keep=0.3)):
        with pool.lease() as lease:
            keys, values = _prefill(lease)
            lease.compress(policy, queries=queries if policy.needs_queries else None)
            target, positions = policy.target_tokens(TOKENS, BLOCK), lease.kept_positions()
            _assert_moved_with_their_positions(lease, keys, values)
            for layer in range(LAYERS):
                scores = reference.distinctness(keys[layer].numpy())
                if policy.needs_queries:
                    told = reference.expected_attention(queries[layer].numpy(), keys[layer].numpy(), 4)
                    for head in range(KV_HEADS):
                        scores[head, 4:] = reference.expected_scores(
                            told[head], values[layer][4:, head].numpy()
                        )
                for head in range(KV_HEADS):
                    ranked = scores[head, : TOKENS - WINDOW]
                    assert reference.gap_at_cut(ranked[4:], target - 4 - WINDOW) > CLEAR_GAP
                    assert positions[layer, head].tolist() == reference.keep_top(ranked, TOKENS, target, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streaming_a_dense_lease_keeps_sinks_and_window(new_pool, layout) -> None:
    with new_pool(_spec(layout)).lease() as lease:
        keys, values = _prefill(lease)
        report = lease.compress(Streaming(sinks=4, window=60))
        assert (lease.kept_positions() == [*range(4), *range(TOKENS - 60, TOKENS)]).all()
        _assert_moved_with_their_positions(lease, keys, values)
        assert (report.tokens_kept, lease.length, lease.position) == (64, 64, TOKENS)


def test_h2o_ranks_by_all_that_was_observed(new_pool) -> None:
    policy = H2O(recent=40, keep=0.3)
    with new_pool(_spec()).lease(policy=policy) as lease:
        keys, values = _prefill(lease, TOKENS - 60)
        first, second = _queries(TOKENS - 60, seed=1), _queries(60, seed=2)
        assert lease.observe(first) == TOKENS - 60
        more_keys, more_values = _prefill(lease, 60, seed=4)
        keys, values = more_keys, more_values
        assert lease.observe(second) == TOKENS
        lease.compress()
        _assert_moved_with_their_positions(lease, keys, values)
        target = policy.target_tokens(TOKENS, BLOCK)
        for layer in range(LAYERS):
            asked = torch.cat([first[layer], second[layer]]).numpy()
            scores = reference.accumulate(asked, keys[layer].numpy())[:, : TOKENS - policy.recent]
            for head in range(KV_HEADS):
                expected = reference.keep_top(scores[head], TOKENS, target, policy.sinks)
                assert lease.kept_positions()[layer, head].tolist() == expected


def test_span_by_block_moves_no_byte_and_keeps_sealed_blocks_shared(new_pool) -> None:
    policy = Span(window=WINDOW, kernel=21, keep=0.4, granularity="block")
    with new_pool(_spec()).lease(policy=policy) as lease:
        keys, values = _prefill(lease)
        lease.seal([bytes([number]) * 32 for number in range(10)])
        before = lease.block_table.tolist()
        report = lease.compress(queries=_queries())
        kept = [before.index(block) for block in lease.block_table.tolist()]
        assert kept == sorted(kept)
        assert lease.sealed_blocks == sum(index < 10 for index in kept)
        slots = [
            16 * index + offset for index in kept for offset in range(16) if 16 * index + offset < TOKENS
        ]
        assert (lease.kept_positions() == slots).all()
        _assert_moved_with_their_positions(lease, keys, values)
        assert not report.out_of_place
        assert report.blocks_freed == len(before) - len(kept) > 0


def test_attention_over_the_compacted_lease_is_that_over_the_kept_tokens(new_pool) -> None:
    with new_pool(_spec()).lease(policy=Dual(window=WINDOW, keep=0.3)) as lease:
        keys, values = _prefill(lease)
        lease.compress(queries=_queries())
        positions = lease.kept_positions().astype(np.int64)
        query = torch.randn(KV_HEADS, 1, DIM_K)
        for layer in range(LAYERS):
            k, v = lease.gather(layer)
            for head in range(KV_HEADS):
                kept = torch.from_numpy(positions[layer, head])
                alone = _attend(query[head], keys[layer][kept, head], values[layer][kept, head])
                assert torch.allclose(_attend(query[head], k[:, head], v[:, head]), alone, atol=1e-6)


def _attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(query @ k.T / math.sqrt(DIM_K), dim=-1) @ v


def test_freed_blocks_are_there_for_others_and_positions_go_on(daemon: Daemon, new_pool) -> None:
    pool = new_pool(_spec(), 32)
    with pool.lease(policy=Dual(window=WINDOW, keep=0.3), lease_ahead=0) as lease:
        _prefill(lease)
        generation = lease.generation
        report = lease.compress(queries=_queries())
        assert report.blocks_freed == report.blocks_before - lease.block_table.size
        status = daemon.pool_status(pool.name)
        assert status.blocks_leased == lease.block_table.size
        assert lease.generation > generation
        assert lease.position == TOKENS > lease.length == lease.compressed_length
        with pool.lease(tokens=20 * BLOCK):
            lease.extend(3)
            lease.commit(3)
            assert lease.kept_positions()[..., -3:].tolist() == [[[300, 301, 302]] * KV_HEADS] * LAYERS


def test_a_pool_without_free_blocks_is_compressed_in_place(new_pool) -> None:
    pool, policy = new_pool(_spec(), 64), Dual(window=WINDOW, keep=0.3)
    with pool.lease(tokens=TOKENS, policy=policy) as lease:
        keys, values = _prefill(lease)
        free = 64 - 2 - lease.block_table.size  # two are kept for queries
        with pool.lease(tokens=free * BLOCK):
            report = lease.compress(queries=_queries())
            assert not report.out_of_place
            _assert_kept(lease, policy, keys, _queries())
            _assert_moved_with_their_positions(lease, keys, values)


def test_a_lease_that_is_short_already_stays_as_it_is(new_pool) -> None:
    with new_pool(_spec()).lease(policy=Dual(window=4, keep=64)) as lease:
        keys, values = _prefill(lease, 50)
        table = lease.block_table.tolist()
        report = lease.compress(queries=_queries(4))
        assert report.unchanged
        assert report.blocks_freed == 0
        assert lease.block_table.tolist() == table
        _assert_moved_with_their_positions(lease, keys, values)


def test_the_queries_blocks_are_given_back(daemon: Daemon, new_pool) -> None:
    pool = new_pool(_spec())
    with pool.lease(policy=Dual(window=WINDOW, keep=0.3)) as lease:
        _prefill(lease)
        lease.compress(queries=_queries())
        assert daemon.pool_status(pool.name).blocks_leased == lease.block_table.size


BAD_QUERIES = {
    "none at all": (None, r"2, window, query heads, 16"),
    "no layers": (torch.zeros(WINDOW, QUERY_HEADS, DIM_K), r"2 layers"),
    "too few layers": (torch.zeros(1, WINDOW, QUERY_HEADS, DIM_K), r"2 layers"),
    "another head_dim": (torch.zeros(LAYERS, WINDOW, QUERY_HEADS, 8), r"query heads, 16"),
    "no token": (torch.zeros(LAYERS, 0, QUERY_HEADS, DIM_K), r"1 to 300 tokens"),
    "more tokens than there are": (torch.zeros(LAYERS, 301, QUERY_HEADS, DIM_K), r"1 to 300 tokens"),
    "an odd number of heads": (torch.zeros(LAYERS, WINDOW, 3, DIM_K), r"multiple of 2 kv heads"),
    "another type": (torch.zeros(LAYERS, WINDOW, QUERY_HEADS, DIM_K, dtype=torch.float64), r"float64"),
    "not a number": (torch.full((LAYERS, WINDOW, QUERY_HEADS, DIM_K), math.nan), r"NaN"),
    "a list": ([[0.0]], r"2 layers"),
}


@pytest.mark.parametrize("case", BAD_QUERIES)
def test_queries_that_cannot_vote_are_refused_with_what_is_needed(new_pool, case) -> None:
    queries, text = BAD_QUERIES[case]
    with new_pool(_spec()).lease(policy=Dual(keep=0.3)) as lease:
        _prefill(lease)
        with pytest.raises(kvd_client.InvalidArgumentError, match=text):
            lease.compress(queries=queries)
        assert lease.length == TOKENS


def test_row_log_sum_exps_of_another_shape_are_refused(new_pool) -> None:
    with new_pool(_spec()).lease(policy=Dual(keep=0.3)) as lease:
        _prefill(lease)
        with pytest.raises(kvd_client.InvalidArgumentError, match="row_lse"):
            lease.compress(queries=_queries(), row_lse=torch.zeros(LAYERS, WINDOW))


def test_sinks_and_window_beyond_the_budget_are_refused_by_the_daemon(new_pool) -> None:
    with new_pool(_spec()).lease(policy=Dual(window=WINDOW, keep=20)) as lease:
        keys, values = _prefill(lease)
        with pytest.raises(kvd_client.InvalidArgumentError, match="smaller window"):
            lease.compress(queries=_queries())
        _assert_moved_with_their_positions(lease, keys, values)
