"""Which GPUs an operator wants, as written and as resolved: `0-3`, `0,2-5`, UUIDs, `all`, `0=GPU-UUID`.

The last is what everything becomes before daemons start: indexes may mean another GPU after a reboot, or when
one has failed; a UUID never does.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.errors import InvalidArgumentError

MAX_INDEX = 99  # no machine has so many GPUs; more is a typing error
MAX_GPUS = 16  # daemons of one kvd; each is two processes
ALL = "all"
_RANGE = re.compile(r"(\d{1,2})(?:-(\d{1,2}))?")
_UUID = re.compile(
    r"(?:(\d{1,2})=)?((?:GPU|MIG)-[0-9A-Fa-f/-]{3,60}|MIG-GPU-[0-9A-Fa-f/-]{3,60})", re.IGNORECASE
)


@dataclass(frozen=True)
class ChosenGpu:
    """Its daemon is called gpuINDEX."""

    index: int
    uuid: str

    @property
    def device(self) -> str:
        return f"gpu{self.index}"


def gpus_text(value: object) -> str:
    """What kvd.toml or the command line says, as one text; empty for none. Raises InvalidArgumentError."""
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | str):
            raise InvalidArgumentError(f'gpus is {value!r}; "0-7", "0,2-5", UUIDs or "all" is needed')
    text = ",".join(str(entry).strip() for entry in entries)
    if text not in ("", ALL):
        list(_entries(text))
    return text


def _entries(text: str) -> Iterator[int | tuple[int | None, str]]:
    """Indexes, and UUIDs with the index they shall have. Raises InvalidArgumentError."""
    for entry in (part.strip() for part in text.split(",")):
        if found := _RANGE.fullmatch(entry):
            first, last = int(found[1]), int(found[2] or found[1])
            if last < first:
                raise InvalidArgumentError(f"gpus: {entry!r} ends before it begins")
            yield from range(first, last + 1)
        elif found := _UUID.fullmatch(entry):
            yield (int(found[1]) if found[1] else None), found[2]
        else:
            raise InvalidArgumentError(
                f'gpus: {entry!r} is no GPU; "0-7", "0,2-5", "all", or UUIDs as nvidia-smi -L shows them'
            )


def chosen_gpus(text: str) -> tuple[ChosenGpu, ...]:
    """Of a text that `resolved` has made."""
    return tuple(_chosen(entry) for entry in _entries(text)) if text else ()


def _chosen(entry: int | tuple[int | None, str]) -> ChosenGpu:
    assert isinstance(entry, tuple), "indexes were resolved"
    index, uuid = entry
    assert index is not None, "UUIDs were given an index"
    return ChosenGpu(index, uuid)


def resolved(text: str, visible: Sequence[str]) -> str:
    """Every GPU as INDEX=UUID, where `visible` are the UUIDs that kvd sees, in order.

    Raises InvalidArgumentError for one that is not there or comes twice.
    """
    entries = range(len(visible)) if text == ALL else _entries(text)
    chosen = [_found(entry, visible) for entry in entries]
    if not 1 <= len(chosen) <= MAX_GPUS:
        raise InvalidArgumentError(f"gpus: {len(chosen)} GPUs; 1 to {MAX_GPUS} can be served")
    for gpus in ([gpu.uuid for gpu in chosen], [gpu.device for gpu in chosen]):
        twice = [name for name in gpus if gpus.count(name) > 1]
        if twice:
            raise InvalidArgumentError(f"gpus: {twice[0]} is named twice")
    return ",".join(f"{gpu.index}={gpu.uuid}" for gpu in chosen)


def _found(entry: int | tuple[int | None, str], visible: Sequence[str]) -> ChosenGpu:
    there = ", ".join(f"{index}={uuid}" for index, uuid in enumerate(visible))
    if isinstance(entry, int):
        if entry >= len(visible):
            raise InvalidArgumentError(f"gpus: there is no GPU {entry} here; there are {there}")
        return ChosenGpu(entry, visible[entry])
    index, name = entry
    matching = [uuid for uuid in visible if uuid.lower().startswith(name.lower())]
    if len(matching) != 1:
        raise InvalidArgumentError(f"gpus: {name} is {'none' if not matching else 'several'} of {there}")
    return ChosenGpu(visible.index(matching[0]) if index is None else index, matching[0])


def names_these(text: str, running: str) -> bool:
    """Whether a text names just the GPUs that `resolved` has made `running` of, as far as texts tell."""
    if not text or not running or text == ALL:
        return bool(text) == bool(running)
    entries, gpus = list(_entries(text)), chosen_gpus(running)
    return len(entries) == len(gpus) and all(
        _is(entry, gpu) for entry, gpu in zip(entries, gpus, strict=True)
    )


def _is(entry: int | tuple[int | None, str], gpu: ChosenGpu) -> bool:
    if isinstance(entry, int):
        return entry == gpu.index
    index, name = entry
    return index in (None, gpu.index) and gpu.uuid.lower().startswith(name.lower())


def memory_text(value: object) -> str:
    """How much of each GPU: a share such as 0.85, or a size. Raises InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidArgumentError(
            f'memory is {value!r}; a share such as 0.85 or a size such as "60GiB" is needed'
        )
    return str(value).strip()


def share_of(text: str) -> float | None:
    """The share, if the text is one and no size."""
    if re.fullmatch(r"0?\.\d{1,6}|1\.0{1,6}|1", text):
        return float(text)
    return None
