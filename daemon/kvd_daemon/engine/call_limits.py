"""What one call may ask for, and of which pool: an operator's limits, below those that the core has.

They are checked before the core decides, not in it: what it decided is in the journal, and must come out the
same when the limits have changed since.
"""

from collections.abc import Sequence

from kvd.errors import SessionNotFoundError
from kvd.policy import Streaming
from kvd.spec import KVSpec
from kvd_daemon.access.gate import Gate
from kvd_daemon.core import Device, LeaseWish, Progress

from .admission import Asker

LEASES = "leases in one call"
BLOCKS = "blocks in one call"


class CallLimits:
    """Of one device. Calls that pass may still be refused by the core."""

    def __init__(self, device: Device, gate: Gate) -> None:
        self._device = device
        self._gate = gate

    def check_lease(self, asker: Asker, pool_name: str, wishes: Sequence[LeaseWish]) -> None:
        """Raises PermissionDeniedError, LimitExceededError, SessionNotFoundError."""
        self._gate.pools.require(asker.tenant, pool_name)
        session = self._device.sessions.get(asker.session_id)
        if session is None:
            raise SessionNotFoundError("the session ended while this call waited; open a new one")
        limits, leases = self._gate.limits, len(session.leases) + len(wishes)
        if leases > limits.leases_per_session:
            raise limits.exceeded("leases_per_session", leases, "leases in one session")
        pool = self._device.pools.get(pool_name)
        if pool is not None:
            blocks = sum([_blocks(wish, pool.spec) for wish in wishes])
            if blocks > limits.blocks_per_call:
                raise limits.exceeded("blocks_per_call", blocks, BLOCKS)

    def check_extend(self, items: Sequence[tuple[Progress, int]]) -> None:
        """Raises LimitExceededError."""
        blocks = 0
        for progress, tokens in items:
            lease = self._device.leases.get(progress.lease_id)
            if lease is not None and not lease.streams:
                blocks += -(-tokens // lease.block_size)
        if blocks > self._gate.limits.blocks_per_call:
            raise self._gate.limits.exceeded("blocks_per_call", blocks, BLOCKS)

    def check_count(self, items: int) -> None:
        """Before the items are read: reading them costs more than counting. Raises LimitExceededError."""
        if items > self._gate.limits.leases_per_call:
            raise self._gate.limits.exceeded("leases_per_call", items, LEASES)


def _blocks(wish: LeaseWish, spec: KVSpec) -> int:
    if isinstance(wish.policy, Streaming):
        return wish.policy.capacity_blocks(spec.block_size)
    return spec.blocks_for(wish.tokens)
