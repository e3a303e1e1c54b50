"""One sequence's right to blocks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvd.arguments import refused, whole
from kvd.convert import policy_to_proto
from kvd.errors import InvalidArgumentError
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.policy import Policy
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import LeaseCall, held, taken_up
from kvd_client._checked import prefix_hashes as checked_hashes
from kvd_client._checked import seconds, token_count
from kvd_client._fence import look, looked_after
from kvd_client._handing import fork, give, shelf_name
from kvd_client._handle import LeaseHandle
from kvd_client._parking import Parkable
from kvd_client._queries import pack_queries
from kvd_client._reading import Readable
from kvd_client._report import CompressionReport, Rope
from kvd_client._resting import Restable
from kvd_client._session import new_request_id
from kvd_client._state import BlockIds, Slots, SlotState, positions, visible_slots

DEFAULT_SHELF_TTL_S = 60.0  # seconds; whoever adopts is there already, or comes with its process
COMPRESS_S = 60.0  # a kernel worker on one CPU core needs some ten seconds for 128k tokens of 32 layers

if TYPE_CHECKING:
    from kvd_client._pool import Pool


class Lease(Parkable, Restable):
    """Made by `Pool.lease`. Use it as a context manager, or call `release()`.

    A *slot* s of a lease lies in block `block_table[s // block_size]` at offset `s % block_size`. Slots below
    `length` are in use; `position` is the next token's true position, above `length` after a compression.

    Calls lock the lease against each other, but the slots are plain memory: write and read them only between
    calls, and take block table and slots anew after `extend` of a streaming lease, `compress` and `seal`.

    Every method may raise LeaseRevokedError, LeaseExpiredError or LeaseLostError (the lease is gone: prefill
    again), LeaseRestingError and LeaseSuspendedError (`wake`, `resume` it first), ClosedError after release,
    ForkedClientError in a forked child; those that say "asks the daemon" also UnavailableError and
    DeadlineExceededError: then the call may have been carried out. Make it again, with the same arguments:
    its answer is what you get, it is not done twice (forks are: those of the first call are released). A
    lease that is garbage collected is released with the client's next call.
    """

    def __init__(self, pool: "Pool", handle: LeaseHandle, lease_ahead: int) -> None:
        self.pool = pool
        self.lease_ahead = lease_ahead
        self.handle = handle
        self.prefix_tokens = handle.state.length
        """Leading tokens that were there already when it was leased: compute the others."""
        self.prompt_hashes: Sequence[bytes] | None = None
        """Of the prompt that it was leased for; see `Pool.lease`."""
        self._session = pool.session

    def __repr__(self) -> str:
        state = self.handle.state
        return (
            f"Lease({self.lease_id}, {self.policy}, length={state.length}, position={state.position}, "
            f"blocks={state.table.size})"
        )

    @property
    def lease_id(self) -> int:
        return self.handle.lease_id

    @property
    def policy(self) -> Policy:
        """What `compress` keeps if it is told nothing else."""
        return self.handle.policy

    @property
    def block_table(self) -> BlockIds:
        """Block ids in slot order, int32, read-only."""
        return self._usable().table

    @property
    def length(self) -> int:
        """Slots in use: what attention reads."""
        return self.handle.state.length

    @property
    def position(self) -> int:
        """The next token's true position: what rotary embeddings and usage counts need."""
        return self.handle.state.position

    @property
    def generation(self) -> int:
        """Fencing token, +1 whenever slots move."""
        return self.handle.state.generation

    @property
    def capacity(self) -> int:
        """Slots of the block table."""
        return self.handle.state.table.size * self.pool.spec.block_size

    @property
    def compressed_length(self) -> int:
        """Leading slots that may hold another token in each layer and head (see `kept_positions`)."""
        return self.handle.state.compressed_length

    @property
    def sealed_blocks(self) -> int:
        """Leading blocks that are shared: never write to them."""
        return self.handle.state.sealed_blocks

    # Slots.

    def slot_mapping(self, start: int, stop: int) -> Slots:
        """Pool slots (block_id * block_size + offset) of the lease's slots [start, stop), int64."""
        state, block_size = self._usable(), self.pool.spec.block_size
        stop = whole("stop", stop, 0, MAX_TOKENS_PER_LEASE)
        start = whole("start", start, 0, stop)
        capacity = state.table.size * block_size
        if stop > capacity:
            raise InvalidArgumentError(f"stop={stop}; the lease has {capacity} slots: extend() it first")
        return state.pool_slots(np.arange(start, stop, dtype=np.int64), block_size)

    def visible_slots(self) -> Slots:
        """Lease slots that attention may read, int64: all in use, or the sinks and the last `window` of a
        streaming lease. `slot_mapping(0, length)[visible_slots()]` are their pool slots."""
        return visible_slots(self._usable(), self.policy)

    def kept_positions(self) -> npt.NDArray[np.int32]:
        """The true position of the token in each slot, [layers, kv_heads, length]."""
        with self._looked_after() as state:
            return positions(state, self.policy, self.pool.spec, self.pool.positions)

    def gather(self, layer: int, framework: str = "torch") -> Any:
        """Copies of K and V of the visible slots, each [visible, kv_heads, head_dim].

        An error, not bytes, if the lease ends or its slots move meanwhile: see `check`.
        """
        with self._looked_after() as state:
            slots = state.pool_slots(visible_slots(state, self.policy), self.pool.spec.block_size)
            return self.pool.gather(layer, slots, framework)

    def readable(self) -> Readable:
        """What another process needs to read the visible slots as they are now: `Pool.gather(layer, this)`
        there, where `Client.pool(read_only=True)` is enough. Commit what is written first."""
        with self._looked_after() as state:
            handle = self.handle
            slots = state.pool_slots(visible_slots(state, self.policy), self.pool.spec.block_size)
            pool_id, position = self.pool.pool_id, state.position
            return Readable(pool_id, self.lease_id, state.generation, handle.fence_slot, position, slots)

    def write(self, layer: int, slots: Slots, k: Any, v: Any) -> None:
        """`Pool.write` into slots that `extend` answered; an error if they were not this lease's all the
        time: see `check`."""
        with self._looked_after():
            self.pool.write(layer, slots, k, v)

    def check(self) -> None:
        """Raises what became of the lease if its table must not be used any more: call it after a step that
        read or wrote the pool's views, before its outcome is used.

        Costs about a microsecond: the daemon is asked only about a lease that has ended or moved. Raises
        LeaseGoneError, LeaseBusyError, StaleGenerationError (take table and slots anew), ClosedError.
        """
        look(self.handle, self.handle.state, self._session)

    def _usable(self) -> SlotState:
        """One state, whatever other threads do meanwhile; taken before it is known to be good."""
        state = self.handle.state
        self.handle.check()
        return state

    def _looked_after(self) -> AbstractContextManager[SlotState]:
        return looked_after(self.handle, self._session)

    # Growing and shrinking.

    def extend(self, tokens: int, wait: float = 0.0) -> Slots:
        """Make room for `tokens` more; their pool slots, int64 [tokens]. Write all of them, then `commit`.

        Asks the daemon only where blocks are missing, and then for `lease_ahead` blocks more. A streaming
        lease moves its oldest blocks to the end instead of growing: `length` may fall. Where more tokens come
        than its blocks hold, those in the middle are passed over: their slots lie in the null block.
        `wait` as in `Pool.lease`. Raises PoolExhaustedError, QuotaExceededError, LimitExceededError.
        """
        return self.pool.extend_many([self], [tokens], wait)[0]

    def commit(self, tokens: int, stream: Any = None) -> None:
        """`tokens` more are written. The daemon hears it with the next call or renewal.

        On a GPU, written means that the kernels have ended: whoever reads next knows nothing of your streams.
        stream=the stream they are in (of torch, cupy or numba, or its address) waits for all that is in it;
        without it, wait yourself (an event, torch.cuda.synchronize()) before you commit.
        """
        self.pool.check_writable()
        tokens = token_count(tokens)
        if stream is not None:
            self.pool.wait_for(stream)
        with self.handle.lock:
            self.handle.check()
            self.handle.state = self.handle.state.committed(tokens, self.pool.spec.block_size)

    def trim(self) -> int:
        """Give back the blocks that hold no token yet; how many. Asks the daemon."""
        self.pool.check_writable()
        deadline = self._session.deadline()
        with held(self._session, [self.handle], deadline):
            state = self.handle.state
            unused = state.table[self.pool.spec.blocks_for(state.length) :]
            if unused.size == 0:
                return 0
            request = pb.ReleaseBlocksRequest(
                request_id=new_request_id(), progress=self.handle.progress(), block_ids=unused.tolist()
            )
            self._make(self._session.lease_service.ReleaseBlocks, request, deadline)
            return int(unused.size)

    def seal(self, prefix_hashes: Sequence[bytes]) -> None:
        """Make the leading full blocks immutable, and findable by `Pool.lease(prefix=...)`. Asks the daemon.

        `prefix_hashes` are 32 bytes each, chained: a block's hash covers all tokens up to its end. Blocks
        that somebody sealed before take the place of this lease's own: the block table changes.
        """
        self.pool.check_writable()
        hashes = checked_hashes("prefix_hashes", prefix_hashes)
        deadline = self._session.deadline()
        with held(self._session, [self.handle], deadline):
            request = pb.SealRequest(
                request_id=new_request_id(), progress=self.handle.progress(), prefix_hashes=hashes
            )
            self._make(self._session.lease_service.Seal, request, deadline)

    def seal_prompt(self) -> None:
        """Seal what is written of the prompt that it was leased for: others with that prompt find it.

        Asks the daemon. Raises InvalidArgumentError of a lease that was made without a prompt.
        """
        if self.prompt_hashes is None:
            raise InvalidArgumentError("this lease was made without a prompt; seal(prefix_hashes) it")
        full = self.length // self.pool.spec.block_size
        self.seal(self.prompt_hashes[: min(full, len(self.prompt_hashes))])

    def release(self) -> None:
        """End the lease; you promise to have stopped writing. Asks the daemon. Harmless twice.

        If the daemon cannot be asked now, the client's next call releases it. Does nothing in a forked child.
        """
        self.pool.release_many([self])

    # Several of it.

    def fork(self, count: int = 1) -> "list[Lease]":
        """`count` leases more that go on from here (parallel samples, beams), sharing all blocks: no byte is
        copied. Asks the daemon.

        Who writes, `extend`s first, which replaces a half full last block by a copy of it for all but the
        last lease that has it: take the block table anew. Streaming leases cannot be forked; forks of a lease
        with running scores cannot `observe`. What `compress(park=True)` has parked stays with this lease
        alone: its forks have nothing to `restore`. Raises LimitExceededError.
        """
        return fork(self, count)

    # Giving it away.

    def publish(self, key: str, ttl: float = DEFAULT_SHELF_TTL_S) -> None:
        """Let another session of your tenant go on with it: `Pool.adopt(key)`, on the same device, without a
        copy. Asks the daemon.

        Length, positions, policy, scores and sealed blocks travel along. You promise to have stopped writing;
        kernels that read or wrote the lease have finished. This object is dead afterwards (ClosedError). The
        lease lives on without this process; nobody's for `ttl` seconds, its blocks come back. Raises
        ShelfKeyTakenError.
        """
        give(self, shelf_name("key", key), "", seconds("ttl", ttl))

    def transfer(self, session_id: str, ttl: float = DEFAULT_SHELF_TTL_S) -> None:
        """`publish` for one session alone (`Client.session_id` there), which is told: `Client.offers`.

        Asks the daemon. Raises ReceiverNotFoundError.
        """
        give(self, "", shelf_name("session_id", session_id), seconds("ttl", ttl))

    # Compression.

    def compress(
        self,
        policy: Policy | None = None,
        queries: Any = None,
        row_lse: Any = None,
        rope: Rope | None = None,
        timeout: float | None = None,
        park: bool = False,
    ) -> CompressionReport:
        """Keep what the policy (default: the lease's) keeps and give the freed blocks back. Asks the daemon.

        queries  post-RoPE, of the lease's last W tokens: torch or numpy [layers, W, query_heads, head_dim_k],
                 float32, float16 or bfloat16; needed by SnapKV, Dual and Span
        row_lse  float32 [layers, W, query_heads], log-sum-exp of the queries' scaled scores; saves a pass
        rope     needed by Streaming(rope="cache")
        park     copy what it holds to the host tier before, for `restore` (TierFullError if there is no room)

        Have the worker's kernels that read or write this lease finished before. Afterwards table, length and
        generation are new; `position` is as before. Raises CompressionRefusedError,
        KernelWorkerUnavailableError, PoolExhaustedError (no blocks for the queries); LeaseLostError if a
        kernel worker died while bytes moved in place, or, with `park`, LeaseSuspendedError: `resume` brings
        back all it held. `timeout` in seconds,
        default COMPRESS_S or the client's, whichever is longer.
        """
        used = self.policy if policy is None else policy
        if not isinstance(park, bool):
            raise refused("park", park, "True or False")
        request = pb.CompressRequest(request_id=new_request_id(), park=park)
        if policy is not None:
            request.policy.CopyFrom(policy_to_proto(policy))
        if rope is not None:
            if not isinstance(rope, Rope):
                raise refused("rope", rope, "a kvd_client.Rope")
            request.rope.CopyFrom(pb.Rope(inv_freq=rope.inv_freq, style=rope.style))
        if queries is None and used.needs_queries:
            spec = self.pool.spec
            needed = f"[{spec.layers}, window, query heads, {spec.head_dim_k}]"
            raise InvalidArgumentError(f"{used} needs queries {needed}: compress(queries=...)")
        if queries is None and row_lse is not None:
            raise InvalidArgumentError("row_lse without the queries it belongs to: compress(queries=...)")
        service = self._session.lease_service
        answer = self._vote(service.Compress, request, (queries, row_lse), timeout)
        self.handle.wanted_floor = 0
        return CompressionReport.from_proto(answer.report)

    def observe(self, queries: Any, row_lse: Any = None, timeout: float | None = None) -> int:
        """Add the attention of the last tokens' queries to the running scores that H2O ranks by; the number
        of slots that have scores now. Asks the daemon. Arguments and errors as for `compress`."""
        request = pb.ObserveRequest(request_id=new_request_id())
        if queries is None:
            raise InvalidArgumentError("queries=None; those of the tokens to observe are needed")
        answer = self._vote(self._session.lease_service.Observe, request, (queries, row_lse), timeout)
        return int(answer.observed_length)

    def _patience_s(self, timeout: float | None) -> float:
        """Of calls that wait for the kernel worker."""
        longest_s = max(COMPRESS_S, self._session.timeout_s)
        return longest_s if timeout is None else seconds("timeout", timeout)

    def _vote(self, method: Any, request: Any, tensors: tuple[Any, Any], timeout: float | None) -> Any:
        """Make a call that may carry queries, which lie in scratch blocks as long as it lasts."""
        self.pool.check_writable()
        queries, row_lse = tensors
        deadline = self._session.deadline(self._patience_s(timeout))

        def asked() -> Any:
            request.progress.CopyFrom(self.handle.progress())
            if queries is not None:
                request.queries.SetInParent()
            return request

        answer = taken_up(self._session, self.handle, asked, deadline)
        if answer is not None:
            return answer
        with held(self._session, [self.handle], deadline):
            if queries is None:
                return self._make(method, asked(), deadline)
            packed = pack_queries(queries, row_lse, self.pool.spec, self.length)
            with self.pool.scratch(packed.payload, deadline) as scratch_lease_id:
                asked().queries.CopyFrom(packed.to_proto(scratch_lease_id))
                return self._make(method, request, deadline)

    def _make(self, method: Any, request: Any, deadline: float) -> Any:
        def apply(answer: Any) -> None:
            if isinstance(answer, pb.ObserveResponse):
                self.handle.learn(self.handle.state)
            else:
                self.handle.learn(self.handle.state.after(answer.lease))

        return LeaseCall([self.handle], method, request, apply).make(self._session, deadline)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
