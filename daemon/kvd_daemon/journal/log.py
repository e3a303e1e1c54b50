"""The journal of one device: segments of records, and a snapshot in place of those that need not be replayed.

Files are numbered. Snapshot n is the state in which segment n begins; what is older than the last snapshot
is deleted as soon as that is complete. Appends go on in the newest segment. Nothing is synced to a disk:
this is for the death of processes, not of machines.
"""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import UnavailableError
from kvd_daemon.core import CORE_VERSION

from .segments import FORMAT_VERSION, MAGIC, SCHEMA_SUM, Header, Segment, record_bytes
from .snapshots import MAGIC as SNAPSHOT_MAGIC
from .snapshots import Moment, write_snapshot

SEGMENT_BYTES = 4 << 20  # bytes; some 20,000 calls, replayed in about a second
RESERVE_BYTES = 1 << 20  # bytes of it that are left for releases while there is no room for another one
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # memory that a journal tells of is gone with a boot
LOG = logging.getLogger("kvd.journal")


def boot_id() -> bytes:
    return bytes.fromhex(BOOT_ID.read_text().strip().replace("-", ""))


@dataclass(frozen=True)
class JournalSettings:
    """Sizes in bytes."""

    segment_bytes: int = SEGMENT_BYTES
    reserve_bytes: int = RESERVE_BYTES


@dataclass(frozen=True)
class Files:
    """The files of a journal by number."""

    folder: Path
    boot_id: bytes

    def segment(self, number: int) -> Path:
        return self.folder / f"{number:010d}.segment"

    def snapshot(self, number: int) -> Path:
        return self.folder / f"{number:010d}.snapshot"

    def header(self, magic: bytes, number: int, chain: int) -> Header:
        return Header(magic, FORMAT_VERSION, CORE_VERSION, SCHEMA_SUM, 0, number, self.boot_id, chain)

    def numbers(self, suffix: str) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob(f"*{suffix}") if path.stem.isdecimal())

    def delete_before(self, number: int) -> None:
        """And what was never completed."""
        for path in self.folder.iterdir():
            if path.stem.isdecimal() and int(path.stem) < number:
                path.unlink()


class Journal:
    """Open for appending. `capture` tells the device's state whenever it is asked."""

    def __init__(
        self, files: Files, settings: JournalSettings, segment: Segment, capture: Callable[[], Moment]
    ) -> None:
        self._files = files
        self._settings = settings
        self._segment: Segment | None = segment
        self._number = segment.header.number
        self._capture = capture
        self._writer = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self._limit = segment.size_bytes - settings.reserve_bytes
        self._trouble = ""
        self._is_closed = False

    @classmethod
    def begin(cls, files: Files, settings: JournalSettings, capture: Callable[[], Moment]) -> "Journal":
        """A new one, in a folder that is not there yet. Raises OSError if there is no room."""
        making = Files(files.folder.with_name(f"{files.folder.name}.new"), files.boot_id)
        if making.folder.exists():
            shutil.rmtree(making.folder)
        making.folder.mkdir(mode=0o700, parents=True)
        segment = _first_segment(making, settings, (0, 0), capture)
        making.folder.rename(files.folder)
        return cls(files, settings, segment, capture)

    @property
    def folder(self) -> Path:
        return self._files.folder

    def require_room(self) -> None:
        """Call before what takes something. Raises UnavailableError if it could not be written down."""
        segment = self._segment
        if segment is not None and segment.end <= self._limit:
            return
        self._make_room()
        if self._segment is None or self._segment.end > self._limit:
            raise UnavailableError(
                f"{self._trouble or 'the journal is closed'}; nothing is leased until there are "
                f"{self._settings.segment_bytes} bytes of room, releases still work",
                folder=self.folder,
                missing_bytes=self._settings.segment_bytes,
            )

    def append(self, payload: bytes) -> None:
        """It outlives this process as soon as this returns."""
        segment = self._segment
        if segment is None or not segment.append(payload):
            self._append_elsewhere(payload)
        elif segment.end > self._limit:
            self._rotate()

    def _make_room(self) -> None:
        was_removed = not self._files.segment(self._number).exists()  # by somebody: nothing would survive
        if self._segment is None or was_removed:
            self._start_over()
        else:
            self._rotate()

    def _append_elsewhere(self, payload: bytes) -> None:
        if self._is_closed:  # a stream that ends meanwhile: whoever takes over counts all of them as lost
            return
        if self._segment is not None and self._next_segment(record_bytes(len(payload))):
            self._segment.append(payload)
        else:  # the record's event has happened already: a snapshot has it
            self._start_over()

    def _rotate(self) -> None:
        """Another segment, and a snapshot in place of the old one; if there is no room, neither."""
        is_idle = self._writing is None or self._writing.done()
        if not self._next_segment(0) or not is_idle:
            return
        self.settle()
        assert self._segment is not None, "it was just made"
        moment, number = self._capture(), self._number
        header = self._files.header(SNAPSHOT_MAGIC, number, self._segment.header.chain)
        self._writing = self._writer.submit(self._write, header, moment)

    def _next_segment(self, record_bytes: int) -> bool:
        """Whether there was room for it."""
        old = self._segment
        assert old is not None, "there is one to go on from"
        number, size = self._number + 1, self._settings.segment_bytes + record_bytes
        header = self._files.header(MAGIC, number, old.chain)
        try:
            new = Segment.create(self._files.segment(number), header, size)
        except OSError as error:
            self._note(f"no room for the journal in {self.folder}: {error.strerror}")
            return False
        old.seal()
        old.close()
        self._use(new)
        return True

    def _note(self, trouble: str) -> None:
        """Once, not with every call that meets it."""
        if trouble != self._trouble:
            self._trouble = trouble
            LOG.error("%s", trouble) if trouble else LOG.info("the journal in %s goes on", self.folder)

    def _use(self, segment: Segment) -> None:
        self._note("")
        self._segment, self._number = segment, segment.header.number
        self._limit = segment.size_bytes - self._settings.reserve_bytes

    def _write(self, header: Header, moment: Moment) -> None:
        try:
            write_snapshot(self._files.snapshot(header.number), header, moment)
            self._files.delete_before(header.number)
        except OSError as error:  # the segments are still there, and replayed
            LOG.error("no snapshot in %s: %s", self.folder, error.strerror)

    def _start_over(self) -> None:
        """There is no room to go on. What is there is worth nothing now; perhaps it makes room enough."""
        if self._is_closed:
            return
        self.settle()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        place = self._number + 1, 0
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
            self._files.delete_before(place[0])
            self._use(_first_segment(self._files, self._settings, place, self._capture))
        except OSError as error:
            self._note(f"there is no journal in {self.folder}, nothing would survive: {error.strerror}")

    def settle(self) -> None:
        """Wait until the snapshot that is being written is complete, if there is one."""
        if self._writing is not None:
            self._writing.result()

    def snapshot_now(self) -> None:
        """A snapshot without records behind it: another version of kvd can go on from there.

        The last thing before a restart: what happens later is a record. Raises UnavailableError.
        """
        self.settle()
        place = self._number + 1, 0 if self._segment is None else self._segment.chain
        try:
            segment = _first_segment(self._files, self._settings, place, self._capture)
        except OSError as error:
            raise UnavailableError(
                f"no room for a snapshot in {self.folder}: {error.strerror}; make some and try again",
                folder=self.folder,
            ) from error
        if self._segment is not None:
            self._segment.close()
        self._use(segment)
        self._files.delete_before(self._number)

    def close(self) -> None:
        """Nothing is written any more; the files stay."""
        self._is_closed = True
        self._writer.shutdown()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def remove(self) -> None:
        """The memory it tells of goes now."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # or somebody has removed it already


def _first_segment(
    files: Files, settings: JournalSettings, place: tuple[int, int], capture: Callable[[], Moment]
) -> Segment:
    """A segment of that number, going on from that checksum, and the snapshot it begins with.

    Raises OSError if there is no room; then there is neither.
    """
    number, chain = place
    segment = Segment.create(
        files.segment(number), files.header(MAGIC, number, chain), settings.segment_bytes
    )
    try:
        write_snapshot(files.snapshot(number), files.header(SNAPSHOT_MAGIC, number, chain), capture())
    except OSError:
        segment.close()
        files.segment(number).unlink()
        raise
    return segment
