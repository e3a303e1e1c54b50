"""The journal of one device: segments of records, and a snapshot in place of those that need not be replayed.

Files are numbered. Snapshot n is the state in which segment n begins; what is older than the last snapshot
is deleted as soon as that is complete. Appends go on in the newest segment. Nothing is synced to a disk:
this is for the death of processes, not of machines.
"""

import errno
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

LITTLE_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_OURS = "was removed, or is another kvd's"

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
            if path.stem.isdecimal() and int(path.stem) < number and not is_folder(path):
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
        self._base = files.numbers(".snapshot")[-1]
        self._is_ours: Callable[[], bool] = lambda: True

    @classmethod
    def begin(cls, files: Files, settings: JournalSettings, capture: Callable[[], Moment]) -> "Journal":
        """A new one, in a folder that is not there yet. Raises OSError if there is no room."""
        making = Files(files.folder.with_name(f"{files.folder.name}.new"), files.boot_id)
        delete(making.folder)
        making.folder.mkdir(mode=0o700, parents=True)
        segment = _first_segment(making, settings, (0, 0), capture)
        making.folder.rename(files.folder)
        return cls(files, settings, segment, capture)

    @property
    def folder(self) -> Path:
        return self._files.folder

    def only_while(self, is_ours: Callable[[], bool]) -> None:
        """Nothing is made or deleted there unless that says so: the place may be another daemon's by now."""
        self._is_ours = is_ours

    def look(self) -> str:
        """To be called now and then: what a daemon after this one would not find; nothing if all is there.

        Files that somebody removed are missed here, not only when the last of them is full; then all there is
        is written again.
        """
        if self._is_closed or self._is_whole():
            return ""
        if not self._is_ours():
            return f"{self.folder.parent} {NOT_OURS}: nothing would outlive this daemon"
        LOG.warning("files of the journal in %s are gone; it is begun anew", self.folder)
        self._start_over()
        return self._trouble

    def _is_whole(self) -> bool:
        if self._segment is None:
            return False
        if self._writing is not None and not self._writing.done():
            return True  # files come and go
        needed = [self._files.segment(number) for number in range(self._base, self._number)]
        there = all(path.exists() for path in [self._files.snapshot(self._base), *needed])
        return there and self._segment.is_at(self._files.segment(self._number))

    def _require_ours(self) -> None:
        """Raises OSError."""
        if not self._is_ours():
            raise OSError(errno.ESTALE, NOT_OURS, str(self.folder.parent))

    def require_room(self) -> None:
        """Call before what takes something. Raises UnavailableError if it could not be written down.

        Not where the place is lost for good: health is red, and who is connected goes on with this daemon.
        """
        segment = self._segment
        if segment is not None and segment.end <= self._limit:
            return
        self._make_room()
        if (self._segment is None or self._segment.end > self._limit) and self._is_ours():
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
        if not self._is_whole():
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
            self._require_ours()
            new = Segment.create(self._files.segment(number), header, size)
        except OSError as error:
            self._note(f"no room for the journal in {self.folder}: {why(error)}")
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
            self._require_ours()
            write_snapshot(self._files.snapshot(header.number), header, moment)
            self._base = header.number
            self._files.delete_before(header.number)
        except OSError as error:  # the segments are still there, and replayed
            LOG.error("no snapshot in %s: %s", self.folder, why(error))

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
            self._require_ours()
            self.folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
            self._files.delete_before(place[0])
            self._use(_first_segment(self._files, self._settings, place, self._capture))
            self._base = self._number
        except OSError as error:
            self._note(f"there is no journal in {self.folder}, nothing would survive: {why(error)}")

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
            self._require_ours()
            segment = _first_segment(self._files, self._settings, place, self._capture)
        except OSError as error:
            raise UnavailableError(
                f"no room for a snapshot in {self.folder}: {why(error)}; make some and try again",
                folder=self.folder,
            ) from error
        if self._segment is not None:
            self._segment.close()
        self._use(segment)
        self._base = self._number
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
        if self._is_ours():
            shutil.rmtree(self.folder, ignore_errors=True)  # or somebody has removed it already


def why(error: OSError) -> str:
    """In words; which file it is about, unless it is about all of them."""
    about = "" if error.errno in LITTLE_ROOM or error.filename is None else f"{error.filename}: "
    return f"{about}{error.strerror}"


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def delete(path: Path) -> None:
    """Whatever it is, if it is there. Raises OSError."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
