"""Instructions by which the lanes of a warp exchange values."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .operands import Name, Operand, Pair
from .program import Instruction
from .registry import operation
from .threads import WARP, Threads

Array = NDArray[Any]
LANES = np.arange(WARP)


def _by_warp(threads: Threads, operand: Operand, type_name: str) -> Array:
    return threads.read_all(operand, type_name).reshape(-1, WARP)


@operation("shfl")
def shuffle(threads: Threads, instruction: Instruction, active: Array) -> None:
    """shfl.sync.{bfly, up, down, idx}.b32; a lane whose source is out of range keeps its own value."""
    goal, source, by, bounds, mask = instruction.operands
    threads.warps(threads.read_all(mask, "u32"), active)
    values = _by_warp(threads, source, "b32")
    amount = _by_warp(threads, by, "u32").astype(np.int64)
    bound = _by_warp(threads, bounds, "u32").astype(np.int64)
    segment, clamp = bound >> 8 & 31, bound & 31
    limit = (LANES & segment) | (clamp & ~segment)
    mode = instruction.suffixes[1]
    lane = {
        "bfly": LANES ^ amount,
        "up": LANES - amount,
        "down": LANES + amount,
        "idx": (LANES & segment) | (amount & ~segment),
    }[mode]
    inside = lane >= limit if mode == "up" else lane <= limit
    moved = np.take_along_axis(values, np.where(inside, lane, LANES) % WARP, axis=1)
    pair = goal if isinstance(goal, Pair) else Pair(_name(goal), _name(goal))
    threads.write(pair.value, moved.reshape(-1), active)
    if isinstance(goal, Pair):
        threads.write(pair.predicate, inside.reshape(-1), active)


def _name(operand: Operand) -> Name:
    assert isinstance(operand, Name)
    return operand


@operation("vote")
def vote(threads: Threads, instruction: Instruction, active: Array) -> None:
    """vote.sync.ballot.b32: bit l is lane l's predicate."""
    if "ballot" not in instruction.suffixes:
        raise PtxError("only vote.sync.ballot is modelled")
    goal, predicate, mask = instruction.operands
    threads.warps(threads.read_all(mask, "u32"), active)
    ones = (_by_warp(threads, predicate, "pred") & active.reshape(-1, WARP)).astype(np.uint64)
    ballots = (ones << LANES.astype(np.uint64)).sum(axis=1).astype(np.uint32)
    threads.write(goal, np.repeat(ballots, WARP), active)


@operation("match")
def match(threads: Threads, instruction: Instruction, active: Array) -> None:
    """match.any.sync.b32: the lanes that hold the same value as this one."""
    if instruction.suffixes != ("any", "sync", "b32"):
        raise PtxError("only match.any.sync.b32 is modelled")
    goal, source, mask = instruction.operands
    threads.warps(threads.read_all(mask, "u32"), active)
    values = _by_warp(threads, source, "b32")
    equal = (values[:, :, None] == values[:, None, :]) & active.reshape(-1, 1, WARP)
    masks = (equal.astype(np.uint64) << LANES.astype(np.uint64)).sum(axis=2).astype(np.uint32)
    threads.write(goal, masks.reshape(-1), active)
