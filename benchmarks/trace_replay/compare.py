"""Share of a trace's blocks that a prefix cache finds, by eviction order and capacity, without a daemon.

    python -m trace_replay.compare [TRACE]

Without a trace, one is made up from a seed.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvd_daemon.core.eviction import ORDERS

from . import candidates, orders
from .made_up import made_up
from .orders import CAPACITIES
from .requests import Request, accesses, bound, read

SEED = 1


def requests_of(path: str | None) -> list[Request]:
    """Those of the file, or made up ones."""
    return made_up(SEED) if path is None else read(Path(path))


def main(path: str | None) -> None:
    requests = requests_of(path)
    total = accesses(requests)
    what = path or f"made up from seed {SEED}"
    print(f"{len(requests)} requests ({what}), {total} blocks; without an end {100 * bound(requests):.1f} %")
    print(f"{'blocks that fit':48s}" + "".join(f"{capacity:8d}" for capacity in CAPACITIES))
    for name in ORDERS:
        _row(f"kvd: {name}", requests, partial(orders.found_blocks, order=name))
    for name in candidates.CANDIDATES:
        _row(name, requests, partial(candidates.found_blocks, name=name))


def _row(name: str, requests: Sequence[Request], found: Callable[[Sequence[Request], int], int]) -> None:
    total = accesses(requests)
    shares = (100 * found(requests, capacity) / total for capacity in CAPACITIES)
    print(f"{name:48s}" + "".join(f"{share:8.1f}" for share in shares), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
