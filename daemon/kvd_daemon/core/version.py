"""Which decisions the core makes."""

CORE_VERSION = 10
"""Raise it whenever the same events would end in another state than before: a journal's records are replayed
only by the version that wrote them. (Its snapshots are read by every version that knows their fields.)"""
