"""Sizes as people write and read them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidArgumentError
from kvd_client.cli.sizes import (
    parse_bytes,
    parse_memory,
    parse_tokens,
    show_bytes,
    show_percent,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2 << 30), ("1.5 g", 3 << 29), ("80GB", 80 * 10**9), ("1_000kib", 1000 << 10)],
)
def test_bytes_are_written_in_either_kind_of_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_128k_tokens_are_131072() -> None:
    assert [parse_tokens(text) for text in ("128k", "1M", "131,072", "0.5k")] == [
        131072,
        1 << 20,
        131072,
        512,
    ]


def test_a_memory_is_one_device_or_several() -> None:
    assert parse_memory("141GiB") == (1, 141 << 30)
    assert parse_memory("8x80GiB") == (8, 80 << 30)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2 parsecs", "1e9", "9999999999TiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="80GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0x80GiB", "x80GiB", "-2x80GiB"])
def test_a_count_of_devices_below_one_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="8x80GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 10, "1 KiB"), (1288490189, "1.2 GiB"), (640 << 30, "640 GiB")],
)
def test_bytes_read_in_their_largest_unit(size: int, text: str) -> None:
    assert show_bytes(size) == text


@settings(max_examples=100)
@given(st.integers(0, 1 << 50))
def test_shown_bytes_are_within_five_percent(size: int) -> None:
    assert abs(parse_bytes(show_bytes(size)) - size) <= size * 0.05 if size else True


def test_a_percentage_never_rounds_something_to_nothing_or_to_all() -> None:
    shown = [show_percent(part, 10_000) for part in (0, 1, 2345, 9999, 10_000)]
    assert shown == ["0 %", "0.1 %", "23.4 %", "99.9 %", "100 %"]


def test_times_read_in_their_two_largest_units() -> None:
    shown = [show_seconds(seconds) for seconds in (0.4, 59, 192.4, 3600, 90_061)]
    assert shown == ["0s", "59s", "3m 12s", "1h", "1d 1h"]
