"""How much a policy keeps, in integers."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgumentError
from kvd.policy import H2O, Dense, Dual, ExpectedAttention, Keep, KeyDiff, SnapKV, Span, Streaming

tokens = st.integers(0, 200_000)
block_sizes = st.sampled_from([1, 8, 16, 64])
ratios = st.fractions(Fraction(1, 1000), 1, max_denominator=1000)


@given(ratios, tokens)
def test_a_ratio_keeps_the_ceiling_exactly(ratio, count) -> None:
    assert Keep.of(ratio).of_tokens(count) == ceil(ratio * count)


def test_a_ratio_given_as_a_float_means_the_decimal_one_writes() -> None:
    assert Keep.of(0.1).of_tokens(1000) == 100
    assert Keep.of(1 - 0.9).of_tokens(1000) == 100
    assert Keep.of(0.15).ratio == Fraction(3, 20)
    assert Keep.of(1).of_tokens(77) == 77
    assert Keep.of(512).of_tokens(10) == 512


@pytest.mark.parametrize(
    "amount", [0, -1, 1.01, 0.0, -0.5, float("nan"), float("inf"), "half", None, True, 1e-12]
)
def test_nothing_else_is_an_amount(amount) -> None:
    with pytest.raises(InvalidArgumentError):
        Keep.of(amount)


@given(ratios, tokens, block_sizes, st.sampled_from([SnapKV, H2O, Span, KeyDiff, ExpectedAttention]))
def test_kept_tokens_are_whole_blocks_or_all_and_hold_sinks_and_window(
    ratio, count, block_size, kind
) -> None:
    policy = kind(keep=ratio)
    window = policy.recent if kind in (H2O, KeyDiff, ExpectedAttention) else policy.window
    wanted = ceil(ceil(ratio * count) / block_size) * block_size
    if wanted >= count:
        assert policy.target_tokens(count, block_size) == count
    elif wanted < policy.sinks + window:
        with pytest.raises(InvalidArgumentError, match="keep more, or use a smaller window"):
            policy.target_tokens(count, block_size)
    else:
        assert policy.target_tokens(count, block_size) == wanted


@given(tokens, block_sizes)
def test_dense_keeps_all_and_streaming_sinks_and_window(count, block_size) -> None:
    assert Dense().target_tokens(count, block_size) == count
    assert Streaming(4, 100).target_tokens(count, block_size) == min(count, 104)


@given(st.integers(0, 100), st.integers(1, 5000), block_sizes)
def test_a_streaming_ring_holds_the_window_while_its_next_block_fills(sinks, window, block_size) -> None:
    policy = Streaming(sinks, window)
    ring = policy.capacity_blocks(block_size) - policy.sink_blocks(block_size)
    assert policy.sink_blocks(block_size) * block_size >= sinks
    assert (ring - 1) * block_size >= window > (ring - 2) * block_size


def test_by_block_the_blocks_of_sinks_and_window_are_kept_whole() -> None:
    policy = Span(sinks=4, window=32, keep=Fraction(1, 10), granularity="block")
    assert policy.target_tokens(1000, 16) == 112
    with pytest.raises(InvalidArgumentError, match="need 64"):  # a sink block, three the window lies in
        policy.target_tokens(330, 16)


def test_a_window_larger_than_the_budget_is_refused_and_a_short_prompt_left_whole() -> None:
    with pytest.raises(InvalidArgumentError):
        SnapKV(window=64, keep=0.5).target_tokens(17, 1)
    assert SnapKV(window=64, keep=0.5).target_tokens(17, 32) == 17


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (SnapKV, {"kernel": 4}),
        (SnapKV, {"kernel": 257}),
        (SnapKV, {"window": 0}),
        (SnapKV, {"pooling": "sum"}),
        (SnapKV, {"sinks": -1}),
        (SnapKV, {"window": True}),
        (Span, {"granularity": "layer"}),
        (Span, {"kernel": 0}),
        (H2O, {"recent": -1}),
        (KeyDiff, {"recent": -1}),
        (ExpectedAttention, {"recent": -1}),
        (Streaming, {"window": 0}),
        (Streaming, {"rope": "none"}),
    ],
)
def test_a_policy_with_a_value_it_cannot_work_with_is_refused_by_name(kind, values) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(values))):
        kind(**values)


def test_a_policy_says_what_it_is() -> None:
    assert str(Dense()) == "dense"
    assert str(Dual()) == "dual(sinks=4, window=32, kernel=5, avg, keep=0.15)"
    assert str(SnapKV(keep=512)) == "snapkv(window=32, kernel=5, avg, keep=512 tokens)"
    assert str(Span(granularity="block")) == "span(block, sinks=4, window=32, kernel=21, keep=0.16)"
    assert str(H2O()) == "h2o(sinks=4, recent=128, keep=0.2)"
    assert str(KeyDiff()) == "keydiff(sinks=4, recent=32, keep=0.5)"
    assert str(ExpectedAttention()) == "expected(sinks=4, recent=32, keep=0.5)"
    assert str(Streaming()) == "streaming(sinks=4, window=1020, rope=original)"
