"""Span by block through the daemon: the table keeps what a float64 oracle keeps, and no byte moves."""

import numpy as np
import pytest
import torch

import kvd_client
from kvd_client import KVSpec, Span
from kvd_cuda import reference

LAYERS, KV_HEADS, QUERY_HEADS, DIM, BLOCK = 2, 2, 4, 16, 16
CLEAR_GAP = 1e-6  # relative; below it float32 may order two scores either way


def prefill(lease: kvd_client.Lease, tokens: int) -> list[np.ndarray]:
    """Random tokens; their keys as the pool rounds them, per layer float64 [tokens, kv_heads, dim]."""
    random = torch.Generator().manual_seed(tokens)
    slots = lease.extend(tokens)
    for layer in range(LAYERS):
        k, v = torch.randn(2, tokens, KV_HEADS, DIM, generator=random)
        lease.pool.write(layer, slots, k, v)
    lease.commit(tokens)
    return [lease.gather(layer)[0].double().numpy() for layer in range(LAYERS)]


def window_queries(window: int) -> torch.Tensor:
    return torch.randn(LAYERS, window, QUERY_HEADS, DIM, generator=torch.Generator().manual_seed(window))


def oracle(policy: Span, keys: list[np.ndarray], queries: torch.Tensor) -> tuple[list[int], float]:
    """The kept blocks' places in the table, and the relative gap at the cut.

    A block ranks by its best token, a token by the mean over layers and kv heads of the pooled maximum that
    any of its group's queries gave it. Blocks with sinks or tokens of the window stay. Where one maximum
    reaches into two blocks they are equal, and the first one stays.
    """
    tokens, window = len(keys[0]), queries.shape[1]
    pooled = []
    for layer in range(LAYERS):
        weights = reference.attention_weights(queries[layer].double().numpy(), keys[layer])
        votes = reference.votes(weights, KV_HEADS, "max")[:, : tokens - window]
        pooled.append(reference.pool(votes, policy.kernel, "max"))
    scores = np.mean(np.stack(pooled), axis=(0, 1))
    fixed = {slot // BLOCK for slot in (*range(policy.sinks), *range(tokens - window, tokens))}
    ranks = {
        block: scores[block * BLOCK : (block + 1) * BLOCK].max()
        for block in range(-(-tokens // BLOCK))
        if block not in fixed
    }
    free = policy.target_tokens(tokens, BLOCK) // BLOCK - len(fixed)
    best = sorted(ranks, key=lambda block: (-ranks[block], block))
    last, first_out = ranks[best[free - 1]], ranks[best[free]]
    return sorted({*fixed, *best[:free]}), (last - first_out) / last


@pytest.mark.parametrize("layout", ["block_outermost", "layer_outermost"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("tokens", "window"), [(300, 32), (304, 5), (333, 64)])
def test_the_table_keeps_the_blocks_that_the_oracle_keeps(new_pool, dtype, layout, tokens, window) -> None:
    policy = Span(window=window, kernel=21, keep=0.4, granularity="block")
    pool = new_pool(KVSpec(LAYERS, KV_HEADS, DIM, dtype, block_size=BLOCK, layout=layout))
    with pool.lease(policy=policy) as lease:
        keys, queries = prefill(lease, tokens), window_queries(window)
        if dtype == "bfloat16":
            queries = queries.bfloat16()
        kept, gap = oracle(policy, keys, queries)
        assert gap == 0 or gap > CLEAR_GAP
        before = lease.block_table
        report = lease.compress(queries=queries)
        assert lease.block_table.tolist() == before[kept].tolist()
        slots = [slot for block in kept for slot in range(block * BLOCK, min((block + 1) * BLOCK, tokens))]
        assert (lease.kept_positions() == slots).all()
        assert (report.tokens_kept, report.blocks_after, report.out_of_place) == (
            len(slots),
            len(kept),
            False,
        )
        for layer in range(LAYERS):
            assert np.array_equal(lease.gather(layer)[0].double().numpy(), keys[layer][slots])


def test_sealed_blocks_are_chosen_alike_and_stay_shared(new_pool) -> None:
    policy = Span(window=32, kernel=21, keep=0.4, granularity="block")
    pool, hashes = new_pool(KVSpec(LAYERS, KV_HEADS, DIM, "float32", block_size=BLOCK)), []
    with pool.lease(policy=policy) as first:
        keys, queries = prefill(first, 300), window_queries(32)
        hashes = [bytes([block]) * 32 for block in range(18)]
        first.seal(hashes)
        kept, _ = oracle(policy, keys, queries)
        table = first.block_table
        first.compress(queries=queries)
        assert first.block_table.tolist() == table[kept].tolist()
        assert first.sealed_blocks == sum(block < 18 for block in kept)
        with pool.lease(300, prefix=hashes) as second:
            assert second.block_table[:18].tolist() == table[:18].tolist()
