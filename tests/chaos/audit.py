"""With all workers at rest: no block is lost, leaked or owned twice."""

from collections import Counter
from typing import Any

from .stage import Stage
from .worker import BLOCKS, POOL


def findings(stage: Stage, states: list[dict[str, Any]]) -> list[str]:
    """What does not add up between what workers hold and what the daemon says."""
    found: list[str] = []
    writable: Counter[int] = Counter()
    shared: set[int] = set()
    for state in states:
        for lease_id, lease in state["leases"].items():
            said, table = stage.table_of(int(lease_id))
            if lease["state"] and (said, table) != (lease["state"], lease["table"]):
                found.append(f"lease {lease_id} is {said} with {table}, its worker has {lease}")
            shared.update(table[: lease["sealed"]])
            writable.update(table[lease["sealed"] :])
    found += [
        f"block {block} is writable by {count} leases" for block, count in writable.items() if count > 1
    ]
    found += [f"block {block} is sealed and writable" for block in shared & set(writable)]
    return found + _counts(stage, set(writable), shared)


def _counts(stage: Stage, writable: set[int], shared: set[int]) -> list[str]:
    pool = next(one for one in stage.status().pools if one.pool.name == POOL)
    states = (pool.blocks_free, pool.blocks_leased, pool.blocks_sealed, pool.blocks_cached)
    found = []
    if sum(states) + pool.blocks_quarantined + 1 != BLOCKS + 1:
        found.append(f"the states of {BLOCKS} blocks sum up to {sum(states) + pool.blocks_quarantined}")
    if pool.blocks_leased != len(writable) or pool.blocks_sealed != len(shared):
        found.append(
            f"{pool.blocks_leased} leased and {pool.blocks_sealed} sealed blocks, "
            f"workers hold {len(writable)} and {len(shared)}"
        )
    return found
