"""A deep copy of anything, comparable: what must be equal before and after a refused call."""

from enum import Enum

import numpy as np

from kvd_daemon.core import Device, Tier
from kvd_daemon.core.blocks import Blocks
from kvd_daemon.core.copied import Copies
from kvd_daemon.core.fences import Fences
from kvd_daemon.core.prefix import PrefixIndex
from kvd_daemon.core.quotas import Quotas
from kvd_daemon.core.shelf import Shelf
from kvd_daemon.core.tiers import Arena

PLAIN = (int, float, str, bytes, bool, type(None), Enum)


def snapshot(thing: object) -> object:
    """Nested tuples of all values that can be reached, in their order."""
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, Fences):  # the rest of it follows from the leases
        return thing.shown()
    if isinstance(thing, Arena):  # which are free follows from those in use
        return snapshot((thing.budget_bytes, thing.used_bytes, dict(thing.used())))
    if isinstance(thing, Copies):  # how many there are follows from them
        return snapshot([thing.on(tier) for tier in Tier])
    if isinstance(thing, Shelf):  # how many each tenant has follows from it
        return snapshot(dict(thing))
    if isinstance(thing, Quotas):  # who listens is no part of the state
        return snapshot({name: value for name, value in vars(thing).items() if name != "_on_return"})
    if isinstance(thing, Blocks):  # generations may be counted later
        return snapshot((thing.state, thing.generation, thing.tenant, thing.holders, thing.counts))
    if isinstance(thing, PrefixIndex):  # ages are counted anew by an image
        order = (thing.order.name, thing.order.image().plain(), thing.cached())
        return snapshot((thing.names.image().plain(), order, sorted(thing._orphans.items())))
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, dict):
        return tuple((snapshot(key), snapshot(value)) for key, value in thing.items())
    if isinstance(thing, set | frozenset):
        return tuple(sorted(thing))
    if isinstance(thing, list | tuple):
        return tuple(snapshot(value) for value in thing)
    if hasattr(thing, "tobytes"):
        return thing.tobytes()
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    values = {name: getattr(thing, name) for name in names} | getattr(thing, "__dict__", {})
    return type(thing).__name__, snapshot(values)


def state_of(device: Device) -> object:
    """Everything that decides what the device will answer, in every order that can matter."""
    return snapshot(device._registry), device.memory_bytes
