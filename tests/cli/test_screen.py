"""Tables and bars on any screen."""

import fcntl
import io
import os
import re
import struct
import termios

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_client.cli.screen import Screen, Table, show_cell
from kvd_client.cli.status_page import share

TABLE = Table(("lease_id", "pool", "total_bytes", "policy"), elastic=("policy",))
ROWS = [
    {"lease_id": 7, "pool": "chat", "total_bytes": 1 << 20, "policy": "streaming(sinks=4, window=1020)"},
    {"lease_id": 12345, "pool": "chat-long", "total_bytes": 5, "policy": ""},
]


def test_a_pipe_gets_every_column_uncut_and_without_colour() -> None:
    lines = TABLE.lines(ROWS, Screen())
    assert lines == [
        "lease_id  pool       total_bytes  policy",
        "       7  chat             1 MiB  streaming(sinks=4, window=1020)",
        "   12345  chat-long          5 B  -",
    ]


def test_a_workers_words_cannot_steer_the_terminal() -> None:
    assert show_cell("client_name", "\x1b[2Jme\n") == "?[2Jme?"


def test_a_narrow_terminal_cuts_free_text_first() -> None:
    lines = TABLE.lines(ROWS, Screen(width=50))
    assert lines[1] == "       7  chat             1 MiB  streaming(sinks…"


def test_a_narrower_one_leaves_the_last_columns_out_and_says_so() -> None:
    lines = TABLE.lines(ROWS, Screen(width=40))
    assert lines[0] == "lease_id  pool       total_bytes"
    assert lines[3:] == ["(1 more field: widen, or use -o json)"]


def test_colour_comes_around_the_text_and_never_changes_it() -> None:
    plain, painted = (TABLE.lines(ROWS, Screen(80, colour)) for colour in (False, True))
    assert plain != painted
    assert [re.sub("\x1b\\[[0-9;]*m", "", line) for line in painted] == plain


@settings(max_examples=200)
@given(st.integers(40, 200), st.lists(st.text("abc", max_size=60), min_size=1, max_size=5))
def test_no_line_is_wider_than_the_terminal(width: int, names: list[str]) -> None:
    table = Table(("lease_id", "blocks", "policy", "tenant"), elastic=("policy",))
    rows = [{"lease_id": i, "blocks": 10**i, "policy": n, "tenant": n[:20]} for i, n in enumerate(names)]
    assert all(len(line) <= width for line in table.lines(rows, Screen(width)))


@settings(max_examples=300)
@given(st.lists(st.integers(0, 1 << 20), min_size=5, max_size=5), st.integers(5, 200))
def test_a_bar_is_full_and_shows_whatever_is_there(counts: list[int], width: int) -> None:
    cells = share(counts, width)
    assert sum(cells) == width
    assert all(cell > 0 for cell, count in zip(cells, counts, strict=True) if count)
    if sum(counts):
        assert all(cell == 0 for cell, count in zip(cells, counts, strict=True) if not count)


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "ascii", "latin-1"])
def test_only_a_utf8_screen_gets_more_than_ascii(encoding: str) -> None:
    screen = Screen.of(io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert screen.unicode == (encoding.lower() in ("utf-8", "utf8"))
    assert screen.width is None
    assert not screen.colour


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "72")
    assert Screen.of(pipe) == Screen(width=72)
    for nonsense in ("0", "", "wide", "-5"):
        monkeypatch.setenv("COLUMNS", nonsense)
        assert Screen.of(pipe).width is None


@pytest.mark.parametrize(
    ("environment", "colour", "steers"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
    ],
    ids=str,
)
def test_a_terminal_gets_what_it_can_show(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], colour: bool, steers: bool
) -> None:
    for name in ("TERM", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 91, 0, 0))
    with open(terminal, "w", encoding="utf-8") as stream:
        assert Screen.of(stream) == Screen(91, colour, unicode=True, steers=steers)
    os.close(controller)
