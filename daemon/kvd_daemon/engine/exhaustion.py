"""What happens when blocks run out: the caller is told when to retry, the holders are asked for some."""

from kvd.errors import PoolExhaustedError

from .events import Pressure
from .sessions import Sessions

RETRY_AFTER_NS = 40_000_000  # ns; a few decode steps, in which sequences end and blocks come back
PRESSURE_INTERVAL_NS = 1_000_000_000  # ns between two pressure events of a pool; workers need time to react


class Exhaustion:
    """Of all pools of a device."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._pressed_ns: dict[str, int] = {}

    def explained(self, error: PoolExhaustedError, now_ns: int) -> PoolExhaustedError:
        """The same with a time to retry; whoever holds blocks of the pool is asked for some.

        Where even an empty pool would be too small, it says so instead.
        """
        details = dict(error.metadata)
        pool, wanted, free = details["pool"], int(details["wanted_blocks"]), int(details["free_blocks"])
        if wanted > int(details["pool_blocks"]):
            return PoolExhaustedError(
                f"{wanted} blocks wanted in pool {pool}, which has {details['pool_blocks']} when empty; "
                "lease fewer tokens, or create a larger pool",
                retry_after_ns=None,
                **details,
            )
        if now_ns - self._pressed_ns.get(pool, -PRESSURE_INTERVAL_NS) >= PRESSURE_INTERVAL_NS:
            self._pressed_ns[pool] = now_ns
            self._press(pool, wanted - free)
        return PoolExhaustedError(
            f"{wanted} blocks wanted in pool {pool}, {free} free; release a lease, compress one, or retry "
            f"after {RETRY_AFTER_NS // 1_000_000} ms",
            retry_after_ns=RETRY_AFTER_NS,
            **details,
        )

    def _press(self, pool: str, wanted_blocks: int) -> None:
        for opened in self._sessions:
            if any(lease.pool == pool for lease in opened.session.leases.values()):
                opened.outbox.put(Pressure(pool, wanted_blocks))
