"""Seal leading blocks under their prefix hashes; give back blocks that hold no token yet."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.errors import BlockInUseError, BlockNotHeldError, InvalidArgumentError
from kvd.limits import HASH_BYTES

from .blocks import NULL_BLOCK, BlockState
from .free_runs import IntArray, runs_of
from .lease import BlockTable, Lease
from .names import Node
from .pool import Pool
from .prefix import ROOT
from .registry import Registry, check_hashes, commit
from .results import Change, Progress
from .session import Session


@dataclass(frozen=True)
class _Seals:
    """Table indices and names of what is sealed now, and of what is swapped for a block sealed before."""

    fresh: list[int]
    nodes: list[Node]
    swapped: list[int]
    twins: list[int]


def seal(registry: Registry, session: Session, progress: Progress, hashes: Sequence[bytes]) -> Change:
    """The leading `len(hashes)` full blocks become immutable and findable; or an error and no change."""
    registry.at_most(hashes, registry.limits.hashes_per_call, "prefix hashes")
    check_hashes(hashes, HASH_BYTES)
    lease = registry.standing(session, progress)
    pool = registry.pool_of(lease)
    _check_sealable(lease, progress, len(hashes))
    tenant = registry.tenants[session.tenant]
    seals = _plan(pool, lease, [Node(tenant, mine, parent) for parent, mine in _chain(hashes)])
    if seals.fresh or seals.swapped:
        _check_shareable(lease)
    commit(lease, progress)
    return _carry_out(registry, lease, seals)


def _chain(hashes: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """(parent, hash) of every block."""
    return list(zip([ROOT, *hashes[:-1]], hashes, strict=True)) if hashes else []


def _check_sealable(lease: Lease, progress: Progress, count: int) -> None:
    full = progress.length // lease.block_size
    if count > full:
        raise InvalidArgumentError(f"{count} hashes, but only {full} blocks are full; seal those")


def _check_shareable(lease: Lease) -> None:
    if lease.scratch or lease.streams:
        kind = "scratch" if lease.scratch else "streaming"
        raise InvalidArgumentError(f"blocks of a {kind} lease are written again, they cannot be sealed")
    if lease.compressed_length:
        raise InvalidArgumentError("compressed blocks are private: seal before compressing")
    if lease.observed_length:
        raise InvalidArgumentError("running scores are private: seal before the first Observe")


def _plan(pool: Pool, lease: Lease, nodes: list[Node]) -> _Seals:
    """Blocks sealed before keep their names; those of a fork have none yet."""
    seals = _Seals([], [], [], [])
    sealed = lease.sealed.tolist()
    for index, node in enumerate(nodes):
        if index < len(sealed) and pool.prefixes.has_name(sealed[index]):
            if pool.prefixes.node(sealed[index]).prefix_hash != node.prefix_hash:
                raise InvalidArgumentError(f"block {index} of the table was sealed under another hash")
            continue
        twin = pool.prefixes.twin(node)
        if twin is None:
            seals.fresh.append(index)
            seals.nodes.append(node)
        else:
            seals.swapped.append(index)
            seals.twins.append(twin)
    return seals


def _carry_out(registry: Registry, lease: Lease, seals: _Seals) -> Change:
    pool = registry.pool_of(lease)
    kept_blocks, sealed = len(lease.blocks), lease.sealed_blocks
    pool.freeze(lease.table[[index for index in seals.fresh if index >= sealed]])
    pool.give_names(lease.table[seals.fresh], seals.nodes)
    if seals.swapped:
        kept_blocks = seals.swapped[0]
        table, swapped = lease.table.copy(), np.array(seals.swapped)
        own, table[swapped] = table[swapped], seals.twins
        tenant = registry.tenants[lease.tenant]
        pool.share(table[swapped], tenant)
        pool.unshare(own[swapped < sealed], tenant)
        pool.give_back(runs_of(own[swapped >= sealed]), BlockState.LEASED, tenant)
        lease.blocks = BlockTable(table)
        lease.generation += 1
        registry.fences.show(lease)
    told = [*seals.fresh[-1:], *seals.swapped[-1:]]
    lease.sealed_blocks = max([sealed, *(index + 1 for index in told)])
    return Change(lease, kept_blocks)


def release_blocks(
    registry: Registry, session: Session, progress: Progress, block_ids: Sequence[int]
) -> Change:
    """Unused blocks leave the table; or an error and no change."""
    lease = registry.standing(session, progress)
    if lease.streams:
        raise InvalidArgumentError("a streaming lease keeps its blocks until it is released")
    first_unused = -(-progress.length // lease.block_size)
    unused = lease.table[first_unused:]
    _check_unused(lease, unused, block_ids)
    commit(lease, progress)
    if not block_ids:
        return Change(lease, len(lease.blocks))
    given = np.array(block_ids, np.int32)
    leaving = np.isin(unused, given)
    kept_blocks = first_unused + int(leaving.argmax())
    table = np.concatenate((lease.table[:first_unused], unused[~leaving]))
    registry.pool_of(lease).give_back(runs_of(given), BlockState.LEASED, registry.tenants[lease.tenant])
    lease.blocks = BlockTable(table)
    return Change(lease, kept_blocks)


def _check_unused(lease: Lease, unused: IntArray, block_ids: Sequence[int]) -> None:
    """Raises unless every id is one of `unused`, named once."""
    left = set(unused.tolist())
    for block_id in block_ids:
        if block_id in left:
            left.remove(block_id)
            continue
        if block_id in unused:
            raise BlockNotHeldError(
                f"block {block_id} is named twice; nothing was released", block_id=block_id
            )
        if block_id != NULL_BLOCK and block_id in lease.table:
            raise BlockInUseError(
                f"block {block_id} holds tokens; compress or release the lease instead", block_id=block_id
            )
        what = "the null block" if block_id == NULL_BLOCK else "no block"
        raise BlockNotHeldError(
            f"block {block_id} is {what} in lease {lease.lease_id}; nothing was released", block_id=block_id
        )
