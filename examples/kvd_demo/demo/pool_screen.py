"""Parts 4 and 5 on the screen: who holds which block of the pool."""

import time
from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from kvd_demo.demo.running import Kvd, Worker

COLUMNS = 80  # blocks a line
MARKS = {"ana": "■", "ben": "□"}  # to be told apart without colour too
STYLES = {"ana": "cyan", "ben": "magenta"}
FREE = "·"
POLL_S = 0.0005  # between two looks at the daemon after the kill


class PoolScreen:
    """A map of the pool, one character a block, and a line about what happens."""

    def __init__(self, kvd: Kvd) -> None:
        self._kvd = kvd
        self.look("")

    def look(self, caption: str) -> None:
        """Ask the daemon who holds what."""
        self._caption = caption
        self._owners = self._kvd.owners()
        self._blocks = self._kvd.pool().pool.blocks_total

    def held_by(self, name: str) -> int:
        """Blocks that a worker held at the last look."""
        return Counter(self._owners.values())[name]

    def __rich__(self) -> RenderableType:
        blocks = Text()
        for block in range(1, self._blocks):
            owner = self._owners.get(block, "")
            end = "\n" if block % COLUMNS == 0 and block + 1 < self._blocks else ""
            blocks.append(MARKS.get(owner, FREE) + end, STYLES.get(owner, "dim"))
        held = Counter(self._owners.values())
        legend = [(f"{MARKS[name]} {name} {held[name]}   ", STYLES[name]) for name in MARKS if held[name]]
        free = (f"{FREE} free {self._blocks - 1 - sum(held.values())}", "dim")
        return Group(Text(self._caption), Text(), blocks, Text.assemble(*legend, free))


def show(console: Console, kvd: Kvd, prompt_file: str) -> None:
    """Fill the pool twice, then kill a worker."""
    with Worker(kvd, "tenant", "ana", prompt_file) as ana, Worker(kvd, "tenant", "ben", prompt_file) as ben:
        for worker in (ana, ben):
            list(worker.events("ready"))
        fingerprint = _fill(console, kvd, ana, ben)
        _crash(console, kvd, ana, ben, fingerprint)


def _fill(console: Console, kvd: Kvd, ana: Worker, ben: Worker) -> str:
    console.print("Every session holds part 1's prompt, byte for byte; ana and ben are processes.")
    screen = PoolScreen(kvd)
    dense = compressed = 0
    fingerprint = ""
    with Live(screen, console=console, refresh_per_second=12):
        for event in ana.order("dense", until="full"):
            dense = event["sessions"]
            screen.look(f"ana leases whole prompts: {dense} sessions")
        for event in ana.order("compress", until="done"):
            fingerprint = event.get("fingerprint", "")
            screen.look(f"the pool is full at {dense} sessions; ana compresses hers with span(keep 16 %)")
        for event in ben.order("compressed", until="full"):
            compressed = event["sessions"]
            screen.look(f"ben, another process, leases what became free: {compressed} sessions more")
    total = dense + compressed
    fact = f"{dense} sessions uncompressed, {total} compressed: {total / dense:.1f} times as many. "
    meaning = "Every one was really leased, filled and pruned; room to read one more prompt is left."
    console.print()
    console.print(Text.assemble((fact, "bold"), meaning))
    return fingerprint


def _crash(console: Console, kvd: Kvd, ana: Worker, ben: Worker, fingerprint: str) -> None:
    console.print()
    console.rule("[bold]5  A worker is killed", align="left", style="dim")
    screen = PoolScreen(kvd)
    blocks, free = screen.held_by("ben"), kvd.pool().blocks_free
    killed = time.monotonic()
    ben.kill()
    while kvd.pool().blocks_free < free + blocks:
        time.sleep(POLL_S)
    milliseconds = (time.monotonic() - killed) * 1e3
    screen.look(f"kill -9 {ben.pid}  (ben)")
    console.print(screen)
    (checked,) = ana.order("check", until="checked")
    intact = "are untouched" if checked["fingerprint"] == fingerprint else "HAVE CHANGED"
    fact = f"{milliseconds:.1f} ms from kill to free"
    meaning = f": all {blocks} blocks of ben can be leased again. ana's bytes {intact}."
    console.print()
    console.print(Text.assemble((fact, "bold"), meaning))
    status = Text(kvd.kvctl("pool", "status", columns=console.width - 4).rstrip())
    console.print()
    console.print(Panel(status, title="$ kvctl pool status", title_align="left", border_style="dim"))
