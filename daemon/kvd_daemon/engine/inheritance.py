"""What a daemon takes over from the one before it."""

from dataclasses import dataclass, field

from kvd_daemon.device.fence_memory import FenceMemory
from kvd_daemon.fd_store import DescriptorStore
from kvd_daemon.journal import RecordingDevice

FENCE = "fence"  # the name under which the fences' memory outlives the daemon


@dataclass(frozen=True)
class Recovery:
    """What was found, for operators. Counts are of what is back, and of what is not."""

    state: str
    detail: str = ""
    records: int = 0
    sessions: int = 0
    leases: int = 0
    lost_leases: int = 0
    lost_pools: int = 0
    duration_ns: int = 0


@dataclass(frozen=True)
class Inheritance:
    """State, memory and processes as they are now. `pidfds` of the device's sessions, by session id."""

    device: RecordingDevice
    store: DescriptorStore
    fences: FenceMemory
    recovery: Recovery
    pidfds: dict[str, int] = field(default_factory=dict)


def nothing_inherited(device: RecordingDevice, store: DescriptorStore) -> Inheritance:
    """The first daemon. Raises DeviceFullError."""
    fences = FenceMemory.create(device.limits.leases + 1)
    device.fences.move_to(fences.words)
    store.put(FENCE, fences.fd)
    return Inheritance(device, store, fences, Recovery("fresh" if store.survives else "volatile"))
