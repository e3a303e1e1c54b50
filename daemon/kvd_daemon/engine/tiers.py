"""The host tier and the disk tier of a device: where slots lie, and what copies and moves their bytes."""

from dataclasses import replace

from kvd_daemon.core import Tier
from kvd_daemon.device.slot_files import disk_file, memory_file
from kvd_daemon.kernel.client import KernelClient
from kvd_daemon.kernel.link import WorkerCommand

from .arenas import Arenas, Place
from .background import Background
from .copy_moving import CopyMoving
from .copying import Copying
from .inheritance import Inheritance
from .moving import Moving
from .spilling import Spilling


class Tiers:
    """Of one device, with their parts, of which each caller needs one or the other."""

    def __init__(
        self,
        inheritance: Inheritance,
        kernel: KernelClient,
        command: WorkerCommand,
        spill_dir: str,
        background: Background,
    ) -> None:
        """`command` starts kernel workers. The disk tier makes its files in `spill_dir`, if there is one."""
        device, health, files = inheritance.device, background.health, inheritance.arenas
        has_disk = bool(spill_dir or files[Tier.DISK])
        self.disk_worker = _disk_worker(command) if has_disk else None
        """Where there is a disk tier, or was one."""
        disk = self.disk_worker
        places = (
            Place(Tier.HOST, memory_file, kernel, files[Tier.HOST]),
            Place(Tier.DISK, lambda _: disk_file(spill_dir), disk or kernel, files[Tier.DISK]),
        )
        self.arenas = {
            place.tier: Arenas(device, inheritance.store, place, background.spawn) for place in places
        }
        self.copying = Copying(device, kernel, self.arenas[Tier.HOST])
        moving = Moving(device, self.arenas, disk, lambda why: health.lacks(why, of="disk tier"))
        self.copies = CopyMoving(device, moving, background.spawn)
        self.spilling = Spilling(device, moving, self.copies, background.spawn)

    def tick(self) -> None:
        """Now and then: what could not be given back is tried again."""
        for arenas in self.arenas.values():
            arenas.tick()

    def close(self) -> None:
        for arenas in self.arenas.values():
            arenas.close()


def _disk_worker(command: WorkerCommand) -> KernelClient:
    command = replace(command, module="kvd_daemon.kernel.disk_worker", name="disk worker")
    return KernelClient(command, lambda: None)
