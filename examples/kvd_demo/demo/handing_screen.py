"""Part 2 on the screen: leases whose process has ended go on in another one."""

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvd_demo.demo.document_screen import DocumentScreen
from kvd_demo.demo.running import Event, Kvd, Worker

MIB = 1 << 20


def show(console: Console, kvd: Kvd, document: DocumentScreen) -> None:
    """Have another process adopt what the reader published, and answer."""
    shelved = kvd.pool().leases_shelved
    console.print(f"The reader has published two leases and ended; {shelved} wait on the shelf.")
    rows: list[Event] = []
    with Worker(kvd, "answerer") as answerer:
        with console.status("another process loads the model"):
            list(answerer.events("ready"))
        with Live(Table(box=None), console=console, refresh_per_second=8) as live:
            for event in answerer.order("go", until=None):
                rows.append(event)
                live.update(_table(rows, document))
    slowest_ms = max(row["seconds"] for row in rows) * 1e3
    fact = f"{slowest_ms:.1f} ms at most instead of {document.read_seconds:.1f} s of reading"
    meaning = ": not a byte was copied, the pool's pages are mapped in both processes."
    console.print()
    console.print(Text.assemble((fact, "bold"), meaning))


def _table(rows: list[Event], document: DocumentScreen) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("adopted", no_wrap=True)
    for name in ("tokens", "blocks", "memory", "in"):
        table.add_column(name, justify="right")
    table.add_column("answer", no_wrap=True)
    for row in rows:
        table.add_row(
            row["key"],
            f"{row['length']:,}",
            str(row["blocks"]),
            f"{row['blocks'] * document.block_bytes / MIB:.0f} MiB",
            f"{row['seconds'] * 1e3:.1f} ms",
            document.answer(row["text"]),
        )
    return table
