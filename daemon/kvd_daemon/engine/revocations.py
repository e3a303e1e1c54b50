"""Leases that an operator takes away: their workers are told when there is no job under way any more."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvd_daemon.core import Device, Lease
from kvd_daemon.core import Revoked as RevokedLease

from .events import Revoked
from .sessions import Sessions


class Revocations:
    """Of one device. Jobs end in `with after_job()`."""

    def __init__(self, device: Device, sessions: Sessions) -> None:
        self._device = device
        self._sessions = sessions
        self._untold: list[tuple[Lease, str]] = []

    def revoke(self, lease_id: int, cause: str) -> RevokedLease:
        """Take a lease away and tell its worker, both when its job has ended if there is one.

        Raises what Device.revoke does.
        """
        revoked = self._device.revoke(lease_id)
        self._untold.append((revoked.lease, cause))
        self._tell()
        return revoked

    @contextmanager
    def after_job(self) -> Iterator[None]:
        """When a lease's job has ended, however it did. Its worker could not have released it before."""
        try:
            yield
        finally:
            self._tell()

    def _tell(self) -> None:
        told, self._untold = self._untold, []
        for lease, cause in told:
            if lease.job is None:
                self._sessions.tell(lease.session_id, Revoked(lease.lease_id, cause))
            else:
                self._untold.append((lease, cause))
