"""What the core has begun and a worker carries out: it ends in the core, however it ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def undone_unless_done(undo: Callable[[BaseException], object]) -> Iterator[None]:
    """`undo` is called with whatever breaks this off: an error, a bug, or being cancelled.

    No worker has the job any more then (see KernelClient.perform), so what it used may be used again.
    """
    try:
        yield
    except BaseException as failure:
        undo(failure)
        raise
