"""Every event of a device, durable against the death of its daemon; see `open_journal`."""

from .calls import CallKind, CallKinds, digest_of
from .log import Journal, JournalSettings
from .recording import RecordingDevice
from .recovery import Found, Opened, open_journal
from .replies import OPERATORS, Reply

__all__ = [
    "OPERATORS",
    "CallKind",
    "CallKinds",
    "Found",
    "Journal",
    "JournalSettings",
    "Opened",
    "RecordingDevice",
    "Reply",
    "digest_of",
    "open_journal",
]
