"""The daemon side of kvd: one process per device owns its memory, its leases and its kernel worker."""

VERSION = "0.1.0"
