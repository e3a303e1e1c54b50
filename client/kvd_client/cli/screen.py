"""What the output may look like, and tables that fit it."""

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from kvd_client.cli.sizes import show_bytes, show_seconds

MIN_WRAP_WIDTH = 12  # columns; words are not broken for a narrower terminal
MIN_TEXT_WIDTH = 12  # columns a cut text keeps, e.g. "streaming(s…"
GAP = 2  # columns between columns
STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35"}
STYLES["cyan"] = "36"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Screen:
    """`width` in columns, or None where nothing must be cut (a file, a pipe).

    steers  whether the cursor can be sent about, to draw over what was drawn before
    """

    width: int | None = None
    colour: bool = False
    unicode: bool = True
    steers: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> "Screen":
        """What `stream` is: colour only on a terminal and without NO_COLOR (no-color.org). A width that
        COLUMNS names holds for a pipe too."""
        is_terminal = stream.isatty()
        steers = is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        return cls(
            width=_columns(stream.fileno() if is_terminal else None),
            colour=steers and not os.environ.get("NO_COLOR"),
            steers=steers,
            unicode=(stream.encoding or "").lower().replace("-", "") == "utf8",
        )

    def paint(self, text: str, *styles: str) -> str:
        if not self.colour or not styles:
            return text
        return f"\x1b[{';'.join(STYLES[style] for style in styles)}m{text}\x1b[0m"

    @property
    def ellipsis(self) -> str:
        return "…" if self.unicode else "~"

    def cut(self, text: str, width: int) -> str:
        return text if len(text) <= width else text[: width - 1] + self.ellipsis


def _columns(terminal_fd: int | None) -> int | None:
    """COLUMNS, or what the terminal says; None if neither says anything."""
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return None if terminal_fd is None else os.get_terminal_size(terminal_fd).columns or None


def show_cell(name: str, value: Any) -> str:
    """A field's value for people: by its name, as every field's name says what it counts."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return show_bytes(value)
    if name.endswith("_percent"):
        return f"{value:.1f} %"
    if name.endswith("_seconds"):
        return show_seconds(value)
    if isinstance(value, int) and not name.endswith(("id", "generation")):
        return f"{value:,}"
    return "".join(char if char.isprintable() else "?" for char in str(value))


@dataclass(frozen=True)
class Table:
    """Columns by importance; those that do not fit the screen are left out from the right.

    `elastic` columns hold free text, which is cut before a column is left out.
    """

    columns: tuple[str, ...]
    elastic: tuple[str, ...] = ()

    def without(self, name: str) -> "Table":
        return replace(self, columns=tuple(column for column in self.columns if column != name))

    def lines(self, records: Sequence[Record], screen: Screen) -> list[str]:
        cells = {name: [show_cell(name, record[name]) for record in records] for name in self.columns}
        widths = {name: max(map(len, [name, *cells[name]])) for name in self.columns}
        shown = self._fit(widths, screen.width)
        numeric = {name for name in shown if all(_is_number(record[name]) for record in records)}
        pad = _padder({name: widths[name] for name in shown}, numeric, screen)
        lines = [screen.paint(pad({name: name for name in shown}), "bold")]
        lines += [pad({name: cells[name][row] for name in shown}) for row in range(len(records))]
        hidden = len(self.columns) - len(shown)
        if hidden:
            fields = f"{hidden} more field{'s' * (hidden > 1)}"
            more = wrap(f"({fields}: widen, or use -o json)", screen.width)
            lines += [screen.paint(line, "dim") for line in more]
        return lines

    def _fit(self, widths: dict[str, int], screen_width: int | None) -> list[str]:
        """The columns shown; shrinks elastic ones in `widths` to what is left."""
        if screen_width is None:
            return list(self.columns)
        least = {
            n: min(w, max(MIN_TEXT_WIDTH, len(n))) if n in self.elastic else w for n, w in widths.items()
        }
        shown, left = list[str](), screen_width + GAP
        for name in self.columns:
            if shown and least[name] + GAP > left:
                break
            shown.append(name)
            left -= least[name] + GAP
        for name in (n for n in shown if n in self.elastic):
            grown = min(widths[name], least[name] + left)
            left -= grown - least[name]
            widths[name] = grown
        return shown


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _padder(widths: dict[str, int], numeric: set[str], screen: Screen) -> Callable[[dict[str, str]], str]:
    def pad(cells: dict[str, str]) -> str:
        parts = []
        for name, width in widths.items():
            cell = screen.cut(cells[name], width)
            parts.append(cell.rjust(width) if name in numeric else cell.ljust(width))
        return (" " * GAP).join(parts).rstrip()

    return pad


def wrap(text: str, width: int | None, indent: str = "") -> list[str]:
    """`text` in lines of `width` columns, broken at spaces; all lines start with `indent`."""
    if width is None:
        return [indent + text]
    return textwrap.wrap(
        text,
        max(width, MIN_WRAP_WIDTH + len(indent)),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def labelled(label: str, text: str, screen: Screen, width: int | None, indent: str = "") -> list[str]:
    """`label` dimmed, then `text`, its later lines below its first. `label` is padded by the caller."""
    left = len(indent) + len(label) + 1
    first, *rest = wrap(text, width and width - left)
    return [f"{indent}{screen.paint(label, 'dim')} {first}", *(" " * left + more for more in rest)]
