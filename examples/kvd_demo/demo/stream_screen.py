"""Part 3 on the screen: a text without end."""

import math
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvd_demo.demo.pool import STREAM_TOKENS, WINDOW_TOKENS
from kvd_demo.demo.running import Event, Kvd, Worker, together

NARROW_COLUMNS = 90  # below, every second mark is left out
MARKS = "▁▂▃▄▅▆▇█"
TITLES = {
    "dense": "dense",
    "streaming": f"streaming, 4 + {WINDOW_TOKENS}",
    "window": f"window only, {WINDOW_TOKENS + 4}",
}
MIB = 1 << 20


@dataclass
class StreamScreen:
    """Each lease's blocks and foretelling so far."""

    block_bytes: int
    marks_step: int
    chunks: dict[str, list[Event]] = field(default_factory=lambda: {name: [] for name in TITLES})

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("lease", no_wrap=True)
        for name in ("position", "blocks", "memory"):
            table.add_column(name, justify="right")
        table.add_column("blocks over time", no_wrap=True)
        table.add_column("perplexity", justify="right")
        most = max((chunk["blocks"] for chunks in self.chunks.values() for chunk in chunks), default=1)
        for name, chunks in self.chunks.items():
            table.add_row(*self._cells(name, chunks, most), style="bold" if name == "streaming" else "")
        return table

    def _cells(self, name: str, chunks: list[Event], most: int) -> list[Text]:
        if not chunks:
            return [Text(TITLES[name]), Text("…", style="dim")]
        last = chunks[-1]
        heights = [(len(MARKS) - 1) * chunk["blocks"] // most for chunk in chunks[:: self.marks_step]]
        line = "".join(MARKS[height] for height in heights)
        return [
            Text(TITLES[name]),
            Text(f"{last['position']:,}"),
            Text(f"{last['blocks']:,}"),
            Text(f"{last['blocks'] * self.block_bytes / MIB:,.0f} MiB"),
            Text(line, style="cyan"),
            Text(self.perplexity(name)),
        ]

    def perplexity(self, name: str) -> str:
        """Of the text behind the first window, as far as it was read."""
        behind = [chunk for chunk in self.chunks[name] if chunk["first"] >= WINDOW_TOKENS + 4]
        tokens = sum(chunk["tokens"] for chunk in behind)
        return f"{math.exp(sum(c['nll'] * c['tokens'] for c in behind) / tokens):.1f}" if tokens else "…"


def show(console: Console, kvd: Kvd) -> None:
    """Run two streamers and show what they tell."""
    screen = StreamScreen(kvd.pool().pool.block_bytes, marks_step=1 if console.width >= NARROW_COLUMNS else 2)
    with (
        Worker(kvd, "streamer", "dense") as dense,
        Worker(kvd, "streamer", "streaming", "window") as others,
        Live(screen, console=console, refresh_per_second=8),
    ):
        for event in together(dense, others):
            screen.chunks[event["name"]].append(event)
    found = {name: screen.perplexity(name) for name in TITLES}
    fact = f"At position {STREAM_TOKENS:,} the streaming lease is on the blocks it started with"
    meaning = ", and would be for ever: its oldest block is recycled, the sink block is locked. Perplexity "
    meaning += f"of the text behind the first window: dense {found['dense']}, streaming "
    meaning += f"{found['streaming']}, the same memory without the first four tokens {found['window']}."
    console.print()
    console.print(Text.assemble((fact, "bold"), meaning))
