"""Traces are read and made up as they should be, and kvd's orders find in them what models of them find."""

import json

import numpy as np
import pytest
from trace_replay import candidates, orders
from trace_replay.made_up import made_up
from trace_replay.requests import Request, accesses, bound, read

from kvd_daemon.core.eviction import ORDERS

PUBLISHED_BOUND = 0.366  # of the published trace of one hour, as all figures here
PUBLISHED_REQUESTS = 12_031
PUBLISHED_ACCESSES = 288_500
PUBLISHED_INPUT_TOKENS = {25: 2306, 50: 6909, 75: 15367, 90: 27367, 99: 85400}
PUBLISHED_OUTPUT_TOKENS = {25: 156, 50: 350, 75: 472, 90: 597}


@pytest.fixture(scope="module")
def hour() -> list[Request]:
    return made_up(1)


def test_a_made_up_trace_has_the_shape_of_the_published_one(hour) -> None:
    assert len(hour) == pytest.approx(PUBLISHED_REQUESTS, rel=0.05)
    assert accesses(hour) == pytest.approx(PUBLISHED_ACCESSES, rel=0.1)
    assert bound(hour) == pytest.approx(PUBLISHED_BOUND, abs=0.03)
    for lengths, published in (
        ([request.input_tokens for request in hour], PUBLISHED_INPUT_TOKENS),
        ([request.output_tokens for request in hour], PUBLISHED_OUTPUT_TOKENS),
    ):
        for quantile, tokens in published.items():
            assert np.percentile(lengths, quantile) == pytest.approx(tokens, rel=0.2), quantile


def test_a_made_up_trace_is_that_of_its_seed(hour) -> None:
    assert made_up(7, ticks=50) == made_up(7, ticks=50)
    assert made_up(7, ticks=50) != made_up(8, ticks=50)
    times = [request.time_ms for request in hour]
    assert times == sorted(times)


def test_a_block_follows_the_same_one_wherever_it_stands(hour) -> None:
    before: dict[int, int] = {}
    for request in hour:
        assert len(request.blocks) == -(-request.input_tokens // 512)
        for parent, block in zip((-1, *request.blocks), request.blocks, strict=False):
            assert before.setdefault(block, parent) == parent


def test_what_is_written_is_read_again(tmp_path) -> None:
    lines = [{"timestamp": 3, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(path) == [Request(3, 600, 7, (0, 9))]
    path.write_text('{"timestamp": 3}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 1 is no request"):
        read(path)


@pytest.mark.parametrize("capacity", [300, 2000])
def test_the_lru_of_kvd_finds_what_a_plain_model_of_lru_finds(hour, capacity) -> None:
    part = hour[:2500]
    assert orders.found_blocks(part, capacity, "lru") == candidates.found_blocks(part, capacity, "LRU")


def test_a_cache_that_holds_everything_finds_what_was_there_before(hour) -> None:
    part = hour[:1000]
    for order in ORDERS:
        assert orders.found_blocks(part, 30_000, order) == round(bound(part) * accesses(part))


def test_the_default_order_finds_more_than_lru_where_the_cache_is_small(hour) -> None:
    part = hour[:5000]
    assert orders.found_blocks(part, 4000, "2q") > 1.05 * orders.found_blocks(part, 4000, "lru")
