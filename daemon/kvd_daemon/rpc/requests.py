"""Messages in: to the core's and the engine's values."""

from collections.abc import Callable, Mapping, Sequence

from kvd.convert import policy_from_proto
from kvd.errors import InvalidArgumentError, PoolNotFoundError
from kvd.policy import Dense
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import LeaseWish, Pool, Progress
from kvd_daemon.engine.admission import Asker
from kvd_daemon.engine.kernel_jobs import GivenQueries, GivenRope
from kvd_daemon.engine.sessions import OpenSession

Waiting = pb.LeaseRequest | pb.ExtendRequest | pb.AdoptRequest | pb.ResumeRequest | pb.RestoreRequest
ANSWER_NS = 20_000_000  # ns before a call's deadline, so that its answer is there in time
DENSE = Dense()


def progress_of(message: pb.LeaseProgress) -> Progress:
    return Progress(message.lease_id, message.generation, message.length, message.position)


def wish_of(item: pb.LeaseItem, scratch: bool) -> LeaseWish:
    """Raises InvalidArgumentError on a policy that makes no sense."""
    policy = policy_from_proto(item.policy) if item.HasField("policy") else DENSE
    return LeaseWish(item.tokens, policy, list(item.prefix_hashes), scratch, item.pin_id, item.floor_tokens)


def wait_of(request: Waiting, time_remaining: Callable[[], float | None]) -> int:
    """How long a call would wait, in ns; that is taken out of it. Raises InvalidArgumentError."""
    wait_ns = request.max_wait.ToNanoseconds()
    if wait_ns < 0:
        raise InvalidArgumentError(f"max_wait of {wait_ns} ns; a duration from 0 on is needed")
    request.ClearField("max_wait")
    remaining_s = time_remaining()
    return wait_ns if remaining_s is None else min(wait_ns, max(0, int(remaining_s * 1e9) - ANSWER_NS))


def asker_of(
    opened: OpenSession,
    request: pb.LeaseRequest | pb.ExtendRequest | pb.ResumeRequest | pb.RestoreRequest,
    time_remaining: Callable[[], float | None],
    growing: Sequence[int] = (),
) -> Asker:
    """Who calls, and how long it would wait: until shortly before its deadline in `time_remaining` at most.

    Takes `max_wait` out of the request: a repeated one is the same however long it would wait. Raises
    InvalidArgumentError on a negative one.
    """
    identity = opened.session.identity
    if not request.HasField("max_wait"):
        return Asker(identity.session_id, identity.tenant, 0, growing)
    wait_ns = wait_of(request, time_remaining)
    return Asker(identity.session_id, identity.tenant, wait_ns, growing)


def refuse_another_pool(request: pb.LeaseRequest | pb.AdoptRequest, pools: Mapping[str, Pool]) -> None:
    """Raises PoolNotFoundError if the worker has mapped another pool of that name."""
    pool = pools.get(request.pool)
    if pool is not None and request.pool_id not in ("", pool.pool_id):
        raise PoolNotFoundError(f"pool {request.pool!r} is another one by now; attach to it again")


def queries_of(message: pb.Queries) -> GivenQueries:
    return GivenQueries(
        scratch_lease_id=message.scratch_lease_id,
        tokens=message.tokens,
        query_heads=message.query_heads,
        dtype=message.dtype,
        has_row_lse=message.has_row_lse,
    )


def rope_of(message: pb.Rope) -> GivenRope:
    return GivenRope(tuple(message.inv_freq), message.style)
