"""How much memory this process could still take: the machine's, or its cgroup's if that is less."""

from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable, or what the tightest cgroup (v1 or v2) above this process leaves if that is less."""
    return min([_mem_available_bytes(root), *_cgroup_rooms_bytes(root)])


def _mem_available_bytes(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 1024


def _cgroup_rooms_bytes(root: Path) -> Iterator[int]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _rooms(root / "sys/fs/cgroup", path, ("memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _rooms(root / "sys/fs/cgroup/memory", path, names)


def _rooms(mount: Path, path: str, names: tuple[str, str]) -> Iterator[int]:
    """The room of the group and of every one above it; groups hidden by a namespace are skipped."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        group = mount.joinpath(*parts[:depth])
        limit, usage = group / names[0], group / names[1]
        if limit.is_file() and usage.is_file() and (text := limit.read_text().strip()) != "max":
            yield max(0, int(text) - int(usage.read_text()) + _reclaimable_bytes(group))


def _reclaimable_bytes(group: Path) -> int:
    """File cache that the kernel drops before it refuses memory."""
    stat = group / "memory.stat"
    if not stat.is_file():
        return 0
    return sum(
        int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")
    )
