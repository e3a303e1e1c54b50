"""The rule of `kvd.arguments` for what transformers users call."""

import pytest
from tests.client.odd_values import odd_values

from kvd_client import Dual, InvalidArgumentError, SnapKV
from kvd_client.hf import KvdCache, attach

from .tiny import forward, some_ids


def cache_with_queries(pool):
    return KvdCache(pool.lease(), "when_asked", Dual(window=4, keep=0.5))


CALLS = {
    "attach model": lambda pool, value: attach(value),
    "KvdCache lease": lambda pool, value: KvdCache(value),
    "KvdCache compress": lambda pool, value: KvdCache(pool.lease(policy=Dual()), value),
    "KvdCache policy": lambda pool, value: KvdCache(pool.lease(), "when_asked", value),
    "window_queries row": lambda pool, value: cache_with_queries(pool).window_queries(value),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("odd", odd_values())
def test_an_odd_value_is_refused(pool, name, odd):
    with pytest.raises(InvalidArgumentError):
        CALLS[name](pool, odd_values()[odd])


def test_a_policy_that_would_never_be_used_is_refused(pool):
    with pytest.raises(InvalidArgumentError, match='compresses "never"; say when'):
        KvdCache(pool.lease(), policy=SnapKV())


def test_compressing_before_the_prompt_has_run_says_what_is_missing(pool, attached):
    cache = cache_with_queries(pool)
    for call in (cache.compress, cache.window_queries):
        with pytest.raises(InvalidArgumentError, match="run the prompt through"):
            call()
    forward(attached, some_ids(40), cache)
    assert cache.window_queries().shape[1] == 4
    assert [report.tokens_kept for report in cache.compress()] == [24]
