"""What was answered to which request: a repeated request gets the first one's reply, after a restart too."""

from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import NamedTuple

MAX_REPLIES = 256  # per session; a worker repeats a call within seconds, or never
OPERATORS = ""
"""In place of a session: all who are none. Theirs is never over."""


class Reply(NamedTuple):
    """`content` is the reply's message, `digest` is the request's, `method` names the call."""

    session_id: str
    request_id: str
    digest: bytes
    method: str
    content: bytes


class Replies:
    """By session and request id; a session's oldest is forgotten first."""

    def __init__(self, limit: int = MAX_REPLIES) -> None:
        self._limit = limit
        self._of: dict[str, OrderedDict[str, Reply]] = {}

    def find(self, session_id: str, request_id: str) -> Reply | None:
        known = self._of.get(session_id)
        return None if known is None else known.get(request_id)

    def keep(self, reply: Reply, sessions: Container[str]) -> None:
        """`sessions` are those there are: what the others were answered is forgotten now and then."""
        known = self._of.get(reply.session_id)
        if known is None:
            stay = [name for name in self._of if name in sessions or name == OPERATORS]
            self._of = {name: self._of[name] for name in stay}
            known = self._of[reply.session_id] = OrderedDict()
        known[reply.request_id] = reply
        if len(known) > self._limit:
            known.popitem(last=False)

    def kept(self, sessions: Iterable[str]) -> list[Reply]:
        """Those of `sessions` and of operators, the oldest first."""
        names = [name for name in (OPERATORS, *sessions) if name in self._of]
        return [reply for name in names for reply in self._of[name].values()]
