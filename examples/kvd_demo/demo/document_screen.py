"""Part 1 on the screen: one document, one question, every policy."""

from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvd_demo.demo.pool import KEEP
from kvd_demo.demo.running import Event, Kvd, Worker

BAR_CELLS = 16  # of the bar that stands for a dense prompt's blocks
NARROW_COLUMNS = 90  # below, the bars would not fit
MIB = 1 << 20


@dataclass
class DocumentScreen:
    """What the reader has told so far."""

    bar_cells: int
    block_bytes: int = 0
    prompt: Event = field(default_factory=dict)
    tokens_read: int = 0
    rows: list[Event] = field(default_factory=list)
    busy_with: str = "loading SmolLM2-135M"
    read_seconds: float = 0.0

    def take(self, event: Event) -> None:
        """One thing more is known."""
        kind = event["event"]
        if kind == "prompt":
            self.prompt, self.busy_with = event, "reading the document"
        elif kind == "prefill":
            self.tokens_read = event["tokens"]
        elif kind == "compressing":
            self.busy_with = event["name"]
        elif kind == "published":
            self.read_seconds = event["read_seconds"]
        else:
            self.rows.append(event)
            self.busy_with = "answering"

    def __rich__(self) -> RenderableType:
        if not self.prompt:
            return Text(f"… {self.busy_with}", style="dim")
        asked, answer, tokens = (self.prompt[name] for name in ("question", "answer", "tokens"))
        intro = f"{tokens:,} tokens of prose, five special numbers among them; each policy keeps {KEEP:.0%}."
        question = Text.assemble(("asked  ", "dim"), asked, ("   answer  ", "dim"), (answer, "bold"))
        if not self.rows:
            body: RenderableType = ProgressBar(total=tokens, completed=self.tokens_read, width=60)
        else:
            body = self._table()
        return Group(Text(intro), question, Text(""), body)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("policy", no_wrap=True)
        table.add_column("blocks", no_wrap=True)
        for name in ("attention", "time", "moved"):
            table.add_column(name, justify="right")
        table.add_column("answer", no_wrap=True)
        for row in self.rows:
            table.add_row(*self._cells(row), style="bold" if row.get("moved") is False else "")
        if self.busy_with != "done":
            table.add_row(Text(f"… {self.busy_with}", style="dim"))
        return table

    def _cells(self, row: Event) -> list[Text]:
        answer = self.answer(row["text"])
        if row["event"] == "dense":
            return [Text("dense"), self._bar(row["blocks"], row["blocks"]), *[Text("")] * 3, answer]
        moved = f"{row['blocks_after'] * self.block_bytes / MIB:.1f} MiB"
        return [
            Text(row["name"]),
            self._bar(row["blocks_after"], row["blocks_before"]),
            Text("" if row["mass"] is None else f"{row['mass']:.0%}"),
            Text(f"{row['seconds'] * 1e3:,.0f} ms"),
            Text(moved) if row["moved"] else Text("0", style="bold green"),
            answer,
        ]

    def _bar(self, after: int, before: int) -> Text:
        cells = round(self.bar_cells * after / before)
        rest = self.bar_cells - cells
        return Text.assemble(f"{after:4} ", ("█" * cells, "cyan"), ("·" * rest, "dim"))

    def answer(self, text: str) -> Text:
        """With whether it is the right one."""
        text = text.replace("<|im_end|>", "")
        right = text == self.prompt["answer"]
        return Text.assemble((text, ""), ("  right" if right else "  wrong", "green" if right else "red"))

    def verdict(self) -> Text:
        """What this run showed, and what it did not."""
        policies = [row for row in self.rows if row["event"] == "row"]
        right = [row for row in policies if row["text"] == self.prompt["answer"]]
        before, after = policies[0]["blocks_before"], policies[0]["blocks_after"]
        by_block = next(row for row in policies if not row["moved"])
        found = f"{before - after} of {before} blocks went back to the pool; {len(right)} of {len(policies)} "
        found += "policies still know the number. "
        span = "Span by block only takes ids out of the block table: no byte moves, and "
        span += f"{by_block['shared']} of its {by_block['blocks_after']} blocks are still shared. "
        warning = "One question proves little: `make bench-quality` asks hundreds."
        return Text.assemble((found, "bold"), span, (warning, "dim"))


def show(console: Console, kvd: Kvd, prompt_file: str) -> "DocumentScreen":
    """Run the reader and show what it tells, which is the answer too."""
    screen = DocumentScreen(BAR_CELLS if console.width >= NARROW_COLUMNS else 0)
    with Worker(kvd, "reader", prompt_file) as reader, Live(screen, console=console, refresh_per_second=8):
        for event in reader.events():
            if event["event"] == "prefill" and not screen.block_bytes:
                screen.block_bytes = kvd.pool().pool.block_bytes
            screen.take(event)
        screen.busy_with = "done"
    console.print()
    console.print(screen.verdict())
    return screen
