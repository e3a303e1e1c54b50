"""What a forked child inherits must not be destroyed there: a channel's end would be told to the parent's
daemon, and the addresses of a mapping (which the child does not have) may hold something else by then."""

import os
import weakref

_living: "weakref.WeakSet[object]" = weakref.WeakSet()
_inherited: list[object] = []


def keep_in_children(thing: object) -> None:
    """If this process forks while `thing` lives, the child never finalizes its copy."""
    _living.add(thing)


def _keep() -> None:
    _inherited.extend(_living)


os.register_at_fork(after_in_child=_keep)
