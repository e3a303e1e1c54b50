"""The prompt of demo and benchmark: read once, leased at any cut, pruned as one of its own would be."""

import pytest
import torch
from kvd_demo.forward import advance
from kvd_demo.sealed_prompt import SealedPrompt
from quality.probing import Probe, Prober

import kvd_client
from kvd_client import H2O, Dual, Span
from kvd_client.hf import KvdCache, attach

BLOCK_SIZE, TOKENS, CUT = 8, 300, 277
CALL_TIMEOUT_S = 120


@pytest.fixture
def pool(shared_kvd):
    spec = kvd_client.KVSpec(2, 2, 16, "float32", block_size=BLOCK_SIZE)
    with kvd_client.connect(shared_kvd.run_dir, timeout=CALL_TIMEOUT_S) as client:
        yield client.pool("sealed", spec, 256)


@pytest.fixture
def model(tiny_model):
    attach(tiny_model)
    return tiny_model


@pytest.fixture
def ids():
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def prompt(pool, model, ids):
    prompt, heard = SealedPrompt(pool, ids, [CUT]), []
    prompt.read(model, heard.append)
    assert heard == [250, 300]
    return prompt


@pytest.mark.parametrize("cut", [CUT, TOKENS])
def test_a_lease_of_it_holds_what_a_prefill_would_have_written(pool, model, ids, prompt, cut):
    with prompt.lease(cut) as lease, pool.lease() as own:
        assert lease.sealed_blocks == cut // BLOCK_SIZE
        advance(model, KvdCache(own), ids[:cut])
        for layer in range(2):
            for mine, wanted in zip(lease.gather(layer), own.gather(layer), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "policy", [Dual(window=8, keep=0.3), Span(window=8, keep=0.3, granularity="block")], ids=str
)
def test_pruned_it_keeps_what_a_cache_of_its_own_keeps(pool, model, ids, prompt, policy):
    pruned = prompt.pruned(policy, CUT)
    with pruned.lease as lease, pool.lease() as own:
        cache = KvdCache(own, "after_prefill", policy)
        advance(model, cache, ids[:CUT])
        assert (lease.kept_positions() == own.kept_positions()).all()
        assert pruned.report.tokens_kept == cache.reports[0].tokens_kept


def test_h2o_pruned_further_keeps_what_it_keeps_from_the_start(pool, model, ids, prompt):
    keeps = [200, 96]
    kept = [step.lease.kept_positions() for step in prompt.pruned_further([H2O(8, keep) for keep in keeps])]
    with prompt.pruned(H2O(8, keeps[-1])).lease as lease:
        assert (lease.kept_positions() == kept[-1]).all()
    assert kept[0].shape[2] == keeps[0]


def test_probes_leave_no_token_behind(pool, model, ids, prompt):
    prober = Prober(model, prompt)
    probe = Probe(CUT, ids[CUT:], 3)
    dense = prober.dense(probe)
    assert torch.equal(dense.logits, prober.dense(probe).logits)
    expected = advance(model, KvdCache(pool.lease()), ids, 3)
    torch.testing.assert_close(dense.logits, expected, rtol=0, atol=1e-4)
    everything = [
        *prober.observed([H2O(8, 200), H2O(8, 96)], probe),
        prober.compressed(Dual(keep=0.3), probe),
    ]
    assert [outcome.report.tokens_kept for outcome in everything] == [200, 96, 88]
    assert pool.lease(TOKENS).length == 0  # there is room again
