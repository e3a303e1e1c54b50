"""What leases have parked, in the order in which they did: what was parked longest goes to disk first."""

from collections.abc import Iterator

from kvd_daemon.core import Device, Lease
from kvd_daemon.core.moving import parcel
from kvd_daemon.core.parked import Parked

FEWEST = 64  # entries; fewer are not worth a look for those that are no more

Parcel = tuple[int, bool]
"""A lease's id, and whether it is the checkpoint."""


class ParcelLine:
    """Of one device, which tells what there is: entries of what is no more are forgotten by and by."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._places: dict[Parcel, None] = {}
        self._look_beyond = FEWEST
        for lease_id in device.leases:
            for place in ((lease_id, False), (lease_id, True)):
                if self.found(place) is not None:
                    self.put(place)

    def __iter__(self) -> Iterator[Parcel]:
        """Those that are parked when their turn comes; others may come and go meanwhile."""
        return (place for place in list(self._places) if self.found(place) is not None)

    def __len__(self) -> int:
        """Entries; at most `FEWEST`, or twice as many as there were parcels at the last look."""
        return len(self._places)

    def put(self, place: Parcel) -> None:
        """The newest one."""
        self._places.pop(place, None)
        self._places[place] = None
        if len(self._places) > self._look_beyond:
            self._places = dict.fromkeys(self)
            self._look_beyond = max(FEWEST, 2 * len(self._places))

    def found(self, place: Parcel) -> tuple[Lease, Parked] | None:
        """Whose it is, and where; None if there is no such parcel (any more)."""
        lease = self._device.leases.get(place[0])
        parked = None if lease is None else parcel(lease, place[1])
        return None if lease is None or parked is None else (lease, parked)
