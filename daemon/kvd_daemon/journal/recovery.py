"""Opening a journal: the state it tells of, or an empty one and a journal moved aside. Never a guess."""

import logging
import stat
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvd.errors import KvdError, UnavailableError
from kvd_daemon.core import CORE_VERSION, Limits
from kvd_daemon.core.image import restore

from .calls import CallKinds, ToldCall
from .codec import CodecError, Decoder
from .log import LITTLE_ROOM, Files, Journal, JournalSettings, boot_id, delete, is_folder, why
from .recording import RecordingDevice
from .records import EVENTS, Record, decoded, digest
from .segments import SCHEMA_SUM, CorruptError, Header, Segment, SegmentReader
from .snapshots import Snapshot, read_snapshot

MAX_ASIDE = 3  # journals kept for whoever wants to know what went wrong; each is some megabytes
IMPOSSIBLE = (KvdError, AssertionError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a device may raise when it is told what never happened."""
LOG = logging.getLogger("kvd.journal")


@dataclass(frozen=True)
class Found:
    """What there was: `state` is "fresh", "recovered" or "quarantined", `detail` why, in words."""

    state: str
    detail: str = ""
    records: int = 0
    duration_ns: int = 0


@dataclass(frozen=True)
class Opened:
    """A device that goes on where the journal ends, and what was found there."""

    device: RecordingDevice
    found: Found


class _OtherBootError(Exception):
    """The machine was started anew since: no memory of then is left."""


def open_journal(
    folder: Path,
    memory_bytes: int,
    limits: Limits,
    settings: JournalSettings | None = None,
    calls: CallKinds | None = None,
) -> Opened:
    """The device as the journal in `folder` left it, or a new one; and its journal is open.

    `calls` are told by their bytes, see calls.py. Raises UnavailableError if there is no room for a new
    journal, or the folder cannot be used.
    """
    settings = settings or JournalSettings()
    files, started_ns = Files(folder, boot_id()), time.monotonic_ns()
    try:
        device, found = _opened(files, RecordingDevice(memory_bytes, limits, calls), settings)
    except OSError as error:
        way_out = f"make {settings.segment_bytes} bytes of room there"
        if error.errno not in LITTLE_ROOM:
            way_out = "make way there, or choose another --run-dir"
        raise UnavailableError(
            f"no journal in {folder}: {why(error)}; {way_out}",
            folder=folder,
            missing_bytes=settings.segment_bytes,
        ) from error
    if (device.memory_bytes, device.limits) != (memory_bytes, limits):
        device.configure(memory_bytes, limits)
    return Opened(device, replace(found, duration_ns=time.monotonic_ns() - started_ns))


def _opened(files: Files, fresh: RecordingDevice, settings: JournalSettings) -> tuple[RecordingDevice, Found]:
    """What is there, or `fresh`."""
    found = Found("fresh")
    if files.folder.exists() or files.folder.is_symlink():
        try:
            return _recovered(files, settings, fresh.call_kinds)
        except CorruptError as error:
            aside = _move_aside(files.folder, "quarantined")
            LOG.error("the journal cannot be trusted, it was moved to %s: %s", aside, error)
            found = Found("quarantined", f"{error}; the journal was moved to {aside}")
        except _OtherBootError:
            aside = _move_aside(files.folder, "before-boot")
            found = Found("fresh", f"the machine was started anew; the journal was moved to {aside}")
    fresh.journal = Journal.begin(files, settings, fresh.moment)
    return fresh, found


def _recovered(files: Files, settings: JournalSettings, calls: CallKinds) -> tuple[RecordingDevice, Found]:
    """Raises CorruptError, _OtherBootError."""
    _refuse_strangers(files)
    snapshots = files.numbers(".snapshot")
    if not snapshots:
        raise CorruptError("there is no snapshot to begin with")
    first = snapshots[-1]
    snapshot = read_snapshot(files.snapshot(first))
    _check_boot(files, snapshot.header)
    device = _restored(snapshot, calls)
    replay = _Replay(device, files, snapshot.header)
    last = replay.segments(first)
    files.delete_before(first)
    segment = Segment.resume(last.path, last.header, last.end, last.chain)
    device.journal = Journal(files, settings, segment, device.moment)
    if not _is_this_version(last.header):
        device.journal.snapshot_now()
    return device, Found("recovered", records=replay.records)


def _refuse_strangers(files: Files) -> None:
    """Raises CorruptError for what kvd never made: reading a pipe would not even end."""
    if not is_folder(files.folder):
        raise CorruptError(f"{files.folder} is no folder")
    for suffix in (".snapshot", ".segment"):
        for path in files.folder.glob(f"*{suffix}"):
            if path.stem.isdecimal() and not stat.S_ISREG(path.lstat().st_mode):
                raise CorruptError(f"{path} is no file")


def _is_this_version(header: Header) -> bool:
    return (header.core_version, header.schema_sum) == (CORE_VERSION, SCHEMA_SUM)


def _check_boot(files: Files, header: Header) -> None:
    if header.boot_id != files.boot_id:
        raise _OtherBootError


def _restored(snapshot: Snapshot, calls: CallKinds) -> RecordingDevice:
    """Raises CorruptError."""
    try:
        device = RecordingDevice(0, snapshot.device["limits"], calls)
        restore(snapshot.device, device)
    except IMPOSSIBLE as error:
        raise CorruptError(f"the snapshot is of no device: {error!r}") from error
    for reply in snapshot.replies:
        device.replies.keep(reply, device.sessions)
    return device


class _Replay:
    """The records behind a snapshot, carried out again."""

    def __init__(self, device: RecordingDevice, files: Files, header: Header) -> None:
        self.records = 0
        self._device = device
        self._files = files
        self._decoder = Decoder()
        self._chain = header.chain

    def segments(self, first: int) -> SegmentReader:
        """All from number `first` on; answers the last one. Raises CorruptError, _OtherBootError."""
        numbers = [number for number in self._files.numbers(".segment") if number >= first]
        if not numbers or numbers != [*range(first, first + len(numbers))]:
            raise CorruptError(f"segments {first} and following are not all there")
        for number in numbers:
            segment = SegmentReader(self._files.segment(number))
            self._segment(segment, number)
        if segment.is_sealed:
            raise CorruptError(f"what followed segment {numbers[-1]} is missing")
        return segment

    def _segment(self, segment: SegmentReader, number: int) -> None:
        header = segment.header
        _check_boot(self._files, header)
        if (header.number, header.chain) != (number, self._chain):
            raise CorruptError(f"{segment.path.name} does not follow what is before it")
        for payload in segment.payloads():
            if not _is_this_version(header):
                raise CorruptError("records follow its snapshot that another version of kvd has written")
            self._record(payload)
        self._chain = segment.chain

    def _record(self, payload: bytes) -> None:
        try:
            record = decoded(payload, self._decoder)
        except CodecError as error:
            raise CorruptError(f"record {self.records} cannot be read: {error}") from error
        if isinstance(record, ToldCall):
            self._carry_out_call(record)
        else:
            self._carry_out(record)
        self.records += 1

    def _carry_out(self, record: Record) -> None:
        for event in record.events:
            answer = self._happens(event.name, event.arguments)
            if digest(answer) != event.digest:
                raise CorruptError(f"record {self.records}: {event.name} has another outcome than it had")
        if record.reply is not None:
            self._device.replies.keep(record.reply, self._device.sessions)

    def _carry_out_call(self, call: ToldCall) -> None:
        kind = self._device.call_kinds.get(call.method)
        if kind is None:
            raise CorruptError(f"record {self.records}: no call is a {call.method}")
        try:
            request_id, arguments = kind.arguments(call.request, call.session_id, call.now_ns)
            reply = kind.reply(self._happens(kind.event, arguments), call.reply)
        except IMPOSSIBLE as error:
            raise CorruptError(
                f"record {self.records}: no {call.method} has such bytes: {error!r}"
            ) from error
        if reply != call.reply:
            raise CorruptError(f"record {self.records}: {call.method} has another reply than it had")
        self._device.replies.keep(call.as_reply(request_id), self._device.sessions)

    def _happens(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The event's answer. Raises CorruptError."""
        try:
            return EVENTS[name](self._device, *arguments)
        except IMPOSSIBLE as error:
            raise CorruptError(f"record {self.records}: {name} fails again: {error!r}") from error


def _move_aside(folder: Path, why: str) -> Path:
    """To a name with the time; of those only the newest few stay."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = folder.with_name(f"{folder.name}.{why}-{stamp}")
    folder.rename(aside)
    older = sorted(folder.parent.glob(f"{folder.name}.*-*"), key=lambda path: path.name.rpartition("-")[2])
    for path in older[:-MAX_ASIDE]:
        delete(path)
    return aside
