"""What a pool has already of a sequence, kept there until a lease takes it."""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from kvd.errors import ClosedError, PinNotFoundError
from kvd.v1 import kvd_pb2 as pb
from kvd_client._checked import prefix_hashes
from kvd_client._session import new_request_id

if TYPE_CHECKING:
    from kvd_client._pool import Pool

DEFAULT_TTL_S = 10.0  # seconds; a lease follows its match in milliseconds, or stands in line for a while


class Match:
    """Made by `Pool.match`. `len(match)` leading blocks are there; pass it to `Pool.lease(prefix=match)`.

    They stay there until a lease takes them (the match is over then), until `release()` or the end of a
    `with`, and for `ttl` seconds at most: afterwards a lease by this match is a PinNotFoundError.
    """

    def __init__(self, pool: "Pool", hashes: Sequence[bytes], pin_id: int) -> None:
        self.hashes = tuple(hashes)
        self.pin_id = pin_id
        self._pool = pool

    def __repr__(self) -> str:
        return f"Match({len(self)} blocks, {self.tokens} tokens)"

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values are there."""
        return len(self) * self._pool.spec.block_size

    def release(self) -> None:
        """Let go of the blocks. Asks the daemon. Harmless twice, after a lease took them, after close()."""
        pin_id, self.pin_id = self.pin_id, 0
        if pin_id and not self._pool.session.is_foreign:
            with suppress(PinNotFoundError, ClosedError):  # it ended by itself, or with the session
                self._pool.unpin(pin_id)

    def name_in(self, item: pb.LeaseItem) -> None:
        """The item's lease takes the blocks. Raises PinNotFoundError if that happened before."""
        pin_id = self.pin_id  # once: another thread may release it meanwhile
        if self.hashes and not pin_id:
            raise PinNotFoundError(f"{self} is over: a lease took it, or it was released; match again")
        item.pin_id = pin_id

    def taken(self) -> None:
        """A lease has the blocks now."""
        self.pin_id = 0

    def __enter__(self) -> "Match":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def find(pool: "Pool", hashes: Sequence[bytes], ttl_s: float) -> Match:
    """Ask the daemon for the longest leading run."""
    asked = prefix_hashes("hashes", hashes)
    if not asked:
        return Match(pool, (), 0)
    request = pb.MatchRequest(request_id=new_request_id(), pool=pool.name, prefix_hashes=asked)
    request.ttl.FromNanoseconds(int(ttl_s * 1e9))
    answer = pool.session.call(pool.session.share_service.Match, request, pool.check)
    return Match(pool, asked[: answer.found], answer.pin_id)
