"""A pool as this process sees it: its memory, and leases of its blocks."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.arguments import listed, refused, whole
from kvd.convert import policy_from_proto, policy_to_proto, runs_from_proto
from kvd.errors import (
    ClosedError,
    InvalidArgumentError,
    KvdError,
    LeaseLostError,
    ReadOnlyError,
)
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.policy import Dense, Policy
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import held
from kvd_client._checked import prefix_hashes, seconds, token_count
from kvd_client._growth import Growth, grow
from kvd_client._handing import shelf_name
from kvd_client._handle import LeaseHandle
from kvd_client._lease import Lease
from kvd_client._match import DEFAULT_TTL_S, Match, find
from kvd_client._memory import PoolMemory
from kvd_client._prompt import Prompt, lease_prompt
from kvd_client._reading import Readable
from kvd_client._session import Session, new_request_id
from kvd_client._state import Slots
from kvd_client._taking import Takings
from kvd_client._waiting import wait_seconds

MAX_LEASE_AHEAD = 1024  # blocks; more is `tokens`
DEFAULT_LEASE_AHEAD = 1  # blocks; a decode step then asks the daemon every 2 * block_size tokens
MAX_PIN_ID = (1 << 63) - 1  # ids count up from 1
WISHES = "a list of LeaseWish"
LEASES = "a list of leases of this pool"


@dataclass(frozen=True)
class LeaseWish:
    """One sequence to be. Raises InvalidArgumentError on values outside the limits.

    tokens       to make room for, a shared prefix included
    policy       what the lease keeps when it is compressed; Streaming also decides how it grows
    prefix       a Match, or hashes of leading sealed blocks to share, as in `Lease.seal`, all of them or none
    lease_ahead  blocks that `extend` asks for beyond what it needs
    floor        tokens it may be pruned to when others need blocks, 0: not at all; the policy's sinks stay.
                 See `Lease.rest` and `Lease.compress_wanted`. The least of use is what the policy you
                 compress with keeps anyway, its sinks + window (or recent) in whole blocks: with `keep`
                 below, it is refused
    """

    tokens: int = 0
    policy: Policy = field(default_factory=Dense)
    prefix: Sequence[bytes] | Match = ()
    lease_ahead: int = DEFAULT_LEASE_AHEAD
    floor: int = 0

    def __post_init__(self) -> None:
        token_count(self.tokens)
        whole("lease_ahead", self.lease_ahead, 0, MAX_LEASE_AHEAD)
        whole("floor", self.floor, 0, MAX_TOKENS_PER_LEASE)
        policy_to_proto(self.policy)
        awaited = getattr(self.prefix, "sync", None)
        if isinstance(awaited, Match):  # of kvd_client.aio, which unwraps a call's arguments alone
            object.__setattr__(self, "prefix", awaited)
        elif not isinstance(self.prefix, Match):
            object.__setattr__(self, "prefix", tuple(prefix_hashes("prefix", self.prefix)))

    def to_proto(self) -> pb.LeaseItem:
        policy = policy_to_proto(self.policy)
        item = pb.LeaseItem(tokens=self.tokens, policy=policy, floor_tokens=self.floor)
        if isinstance(self.prefix, Match):
            self.prefix.name_in(item)
        else:
            item.prefix_hashes.extend(self.prefix)
        return item


class Pool:
    """Made by `Client.pool`. Thread-safe. `close()` (or `with`) releases the leases made through it.

    Views of its memory stay valid as long as anybody holds them, also after `close()`.
    """

    def __init__(
        self, session: Session, session_id: str, pool: pb.Pool, memory: PoolMemory, keeper: object
    ) -> None:
        self.name = pool.name
        self.pool_id = pool.pool_id
        self.spec: KVSpec = memory.spec
        self.session = session
        self.session_id = session_id
        self._memory: PoolMemory | None = memory
        self._blocks_total = memory.blocks_total
        self.read_only = not memory.writable
        self.fences = memory.fences
        self._keeper = keeper  # a client nobody else holds must live as long as its pools
        self._gone: KvdError | None = None
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._made = threading.Lock()  # held by who goes through `_leases` or adds to it
        self._takings = Takings(session, session_id, self.check)

    def __repr__(self) -> str:
        return f"Pool({self.name!r}, {self.blocks} blocks, {self.spec})"

    @property
    def blocks(self) -> int:
        """Blocks that can be leased; views have one more, the null block 0."""
        return self._blocks_total - 1

    def check(self) -> None:
        """Raises ClosedError after close() or a lost session, ForkedClientError in a forked child."""
        self.session.check_usable()
        if self._gone is not None:
            raise type(self._gone)(str(self._gone))

    def check_writable(self) -> None:
        """Raises ReadOnlyError if this is a pool of `Client.pool(read_only=True)`."""
        if self.read_only:
            raise ReadOnlyError(
                f"pool {self.name!r} is mapped for reading alone here; client.pool({self.name!r}) maps it "
                "for writing"
            )

    def lose(self, cause: KvdError) -> None:
        """The session or the pool's memory is gone. Mapped is what views still use."""
        self._gone = cause
        self._memory = None

    def lose_memory(self, cause: str) -> None:
        """The pool is gone from the device, and with it what its leases held."""
        for lease in self._living():
            lease.handle.fail(LeaseLostError(f"lease {lease.lease_id} is lost: {cause}; prefill again"))
        self.lose(ClosedError(f"{cause}; call client.pool() again"))

    @property
    def _mapped(self) -> PoolMemory:
        memory = self._memory
        self.check()
        assert memory is not None, "a pool says why before it lets go of its memory"
        return memory

    # Memory.

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """The positions plane, int32 [blocks, layers, kv_heads, block_size], read-only: valid for the slots
        of a lease below its `compressed_length`. `Lease.kept_positions` completes it."""
        return self._mapped.positions

    def layer(self, index: int, framework: str = "torch") -> Any:
        """K and V of one layer, each [blocks, block_size, kv_heads, head_dim], strided, without a copy.

        framework="torch": tensors of the pool's dtype; "numpy" (host), "cupy" and "numba" (GPU): arrays,
        where bfloat16 is uint16 and float8 uint8, the bit patterns. Every process that maps the pool sees the
        same bytes; write only into the slots of your own leases. Views keep the memory mapped.
        """
        return self._mapped.layer(index, framework)

    def write(self, layer: int, slots: Slots, k: Any, v: Any) -> None:
        """Store K [n, kv_heads, head_dim_k] and V [n, kv_heads, head_dim_v] in pool slots [n].

        Torch tensors of any float type, or numpy arrays of the type that `layer` has. Raises
        InvalidArgumentError on anything else, ReadOnlyError; nothing is written then.
        """
        self.check_writable()
        self._mapped.write(layer, slots, k, v)

    def gather(self, layer: int, slots: Slots | Readable, framework: str = "torch") -> Any:
        """Copies of K and V in pool slots [n], each [n, kv_heads, head_dim].

        Of slots that `Lease.readable` told, here or elsewhere, a StaleGenerationError, not bytes, if the
        lease has ended or moved.
        """
        if isinstance(slots, Readable):
            with slots.looked_after(self.pool_id, self.fences) as its:
                return self._mapped.gather(layer, its, framework)
        return self._mapped.gather(layer, slots, framework)

    def wait_for(self, stream: Any) -> None:
        """Returns when everything in that stream of the GPU is done; see `Lease.commit`.

        Raises InvalidArgumentError of a pool in host memory, GpuError of whatever failed in the stream.
        """
        self._mapped.wait_for(stream)

    # Leases.

    def lease(
        self,
        tokens: int = 0,
        policy: Policy | None = None,
        prefix: Sequence[bytes] | Match = (),
        lease_ahead: int = DEFAULT_LEASE_AHEAD,
        wait: float = 0.0,
        prompt: Any = None,
        namespace: str = "",
        floor: int = 0,
    ) -> Lease:
        """Lease blocks for one sequence; see LeaseWish. Asks the daemon.

        wait    seconds to stand in the daemon's line for when blocks are short, on top of the client's
                timeout
        prompt  token ids: what is sealed here of them under the hashes of `kvd_client.prefix` with
                `namespace` becomes the prefix (but never the last token, which the model has to see), and
                there is room for all of them. `Lease.prefix_tokens` tells how many need no prefill;
                `Lease.seal_prompt` lets others find the rest.

        Raises PoolExhaustedError, QuotaExceededError, LimitExceededError, PrefixNotFoundError,
        PinNotFoundError, UnavailableError, DeadlineExceededError.
        """
        self.check_writable()
        wish = LeaseWish(tokens, Dense() if policy is None else policy, prefix, lease_ahead, floor)
        if prompt is None:
            return self.lease_many([wish], wait)[0]
        return lease_prompt(self, wish, Prompt.of(prompt, self.spec.block_size, namespace), wait)

    def match(self, hashes: Sequence[bytes], ttl: float = DEFAULT_TTL_S) -> Match:
        """Find the longest leading run of hashes whose blocks are here, and keep them here for `ttl` seconds,
        60 at most. Asks the daemon. Nothing found is a match of length 0.

        Raises PoolExhaustedError and QuotaExceededError where holding them would be too much,
        LimitExceededError.
        """
        return find(self, hashes, seconds("ttl", ttl))

    def pin(self, hashes: Sequence[bytes]) -> int:
        """Keep the blocks of all these hashes here until `unpin` of the answer, whatever session ends.

        Asks the daemon. Raises PrefixNotFoundError, QuotaExceededError (the tenant's `pin_blocks`, which are
        none by default).
        """
        named = prefix_hashes("hashes", hashes)
        request = pb.PinRequest(request_id=new_request_id(), pool=self.name, prefix_hashes=named)
        answer = self.session.call(self.session.share_service.Pin, request, self.check)
        return int(answer.pin_id)

    def unpin(self, pin_id: int) -> None:
        """End a pin, of this or another session of the tenant. Asks the daemon. Raises PinNotFoundError."""
        request = pb.UnpinRequest(request_id=new_request_id(), pin_id=whole("pin_id", pin_id, 0, MAX_PIN_ID))
        self.session.call(self.session.share_service.Unpin, request, self.check)

    def lease_many(self, wishes: Sequence[LeaseWish], wait: float = 0.0) -> list[Lease]:
        """Lease for several sequences, all or none, in one call. Asks the daemon.

        `wait` and errors as of `lease`.
        """
        self.check_writable()
        wait_s = wait_seconds(wait)
        wishes = listed("wishes", wishes, WISHES)
        for wish in wishes:
            if not isinstance(wish, LeaseWish):
                raise refused("wishes", [wish], WISHES)
        self.check()
        if not wishes:
            return []
        request = self._request([wish.to_proto() for wish in wishes])
        answers = self._grant(request, self.session.deadline(self.session.timeout_s + wait_s), wait_s)
        for wish in wishes:
            if isinstance(wish.prefix, Match):
                wish.prefix.taken()
        return [
            self.adopt_state(wish.policy, wish.lease_ahead, answer)
            for wish, answer in zip(wishes, answers, strict=True)
        ]

    def adopt(self, key: str, wait: float = 0.0, lease_ahead: int = DEFAULT_LEASE_AHEAD) -> Lease:
        """Go on with a lease that a session of your tenant published: all it had, and no byte copied.

        wait  seconds to wait for it to be published, on top of the client's timeout

        Asks the daemon. Raises OfferNotFoundError (nothing there, not any more, or not for this session),
        LimitExceededError. A call that broke off is taken up by the next one for that key.
        """
        key, wait_s = shelf_name("key", key), wait_seconds(wait)
        whole("lease_ahead", lease_ahead, 0, MAX_LEASE_AHEAD)
        self.check()
        answer = self._takings.adopt(self.name, self.pool_id, key, wait_s)
        return self.adopt_state(policy_from_proto(answer.policy), lease_ahead, answer.lease)

    def extend_many(self, leases: Sequence[Lease], tokens: Sequence[int], wait: float = 0.0) -> list[Slots]:
        """`Lease.extend` for several leases, all or none, in at most one call: one number for each.

        Asks the daemon only where blocks are missing.
        """
        self.check_writable()
        wait_s = wait_seconds(wait)
        leases = self._own(leases)
        tokens = [token_count(count) for count in listed("tokens", tokens, "a number for each lease")]
        if len(tokens) != len(leases):
            raise InvalidArgumentError(f"{len(tokens)} numbers of tokens for {len(leases)} leases")
        handles = [lease.handle for lease in leases]
        block_size = self.spec.block_size
        deadline = self.session.deadline(self.session.timeout_s + wait_s)
        with held(self.session, handles, deadline):
            growths = [
                Growth(lease.handle, count, lease.lease_ahead)
                for lease, count in zip(leases, tokens, strict=True)
            ]
            grow(self.session, growths, block_size, deadline, wait_s)
            return [
                handle.state.slots_of_next(count, block_size)
                for handle, count in zip(handles, tokens, strict=True)
            ]

    def release_many(self, leases: Sequence[Lease]) -> None:
        """`Lease.release` for several leases, in one call. Asks the daemon."""
        leases = self._own(leases)
        if self.session.is_foreign:
            return
        for lease in leases:
            lease.handle.end()
        self.session.release_orphans()

    def _own(self, leases: Sequence[Lease]) -> list[Lease]:
        """Raises InvalidArgumentError unless they are distinct leases of this pool's."""
        checked = listed("leases", leases, LEASES)
        for lease in checked:
            if not isinstance(lease, Lease):
                raise refused("leases", [lease], LEASES)
            if lease.pool.session is not self.session or lease.pool.name != self.name:
                raise InvalidArgumentError(f"{lease} is none of this client's in pool {self.name!r}")
        if len({id(lease) for lease in checked}) != len(checked):
            raise InvalidArgumentError("a lease is named twice in one call; name each once")
        return checked

    def adopt_state(self, policy: Policy, lease_ahead: int, answer: pb.LeaseState) -> Lease:
        """A lease that the daemon made this session's."""
        handle = LeaseHandle(self, policy, answer)
        self.session.adopt_lease(handle.lease_id, handle, self.session_id)
        lease = Lease(self, handle, lease_ahead)
        with self._made:
            self._leases.add(lease)
        return lease

    def _living(self) -> list[Lease]:
        with self._made:
            return list(self._leases)

    def settle(self, deadline: float) -> None:
        """Called by the session now and then: what calls took that broke off goes back."""
        self._takings.settle(deadline)

    def _request(self, items: Sequence[pb.LeaseItem], scratch: bool = False) -> pb.LeaseRequest:
        return pb.LeaseRequest(
            request_id=new_request_id(), pool=self.name, pool_id=self.pool_id, items=items, scratch=scratch
        )

    def _grant(self, request: pb.LeaseRequest, deadline: float, wait_s: float = 0.0) -> list[pb.LeaseState]:
        """Make a call that leases. One that broke off may have leased: the next one gives that back."""
        self._takings.give_back(deadline)
        return self._takings.lease(request, deadline, wait_s)

    @contextmanager
    def scratch(self, payload: npt.NDArray[np.uint8], deadline: float) -> Iterator[int]:
        """The id of a lease whose blocks hold `payload`, for the time of one call. For `Lease.compress`."""
        blocks = -(-payload.size // self.spec.block_bytes)
        item = pb.LeaseItem(tokens=blocks * self.spec.block_size)
        (answer,) = self._grant(self._request([item], scratch=True), deadline)
        with ExitStack() as stack:
            stack.callback(self.session.orphan, answer.lease_id, self.session_id)
            self._mapped.write_blocks(runs_from_proto(answer.appended), payload)
            yield answer.lease_id
        self.session.release_orphans(deadline)

    def close(self) -> None:
        """Release the leases made through this. Asks the daemon. Harmless twice and in a forked child."""
        if self.session.is_foreign or self._gone is not None:
            return
        self.release_many(self._living())
        self.lose(ClosedError(f"this handle of pool {self.name!r} is closed; call client.pool() again"))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
