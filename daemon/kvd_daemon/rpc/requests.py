"""Messages in: to the core's and the engine's values."""

from kvd.convert import policy_from_proto
from kvd.policy import Dense
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import LeaseWish, Progress
from kvd_daemon.engine.kernel_jobs import GivenQueries, GivenRope

DENSE = Dense()


def progress_of(message: pb.LeaseProgress) -> Progress:
    return Progress(message.lease_id, message.generation, message.length, message.position)


def wish_of(item: pb.LeaseItem, scratch: bool) -> LeaseWish:
    """Raises InvalidArgumentError on a policy that makes no sense."""
    policy = policy_from_proto(item.policy) if item.HasField("policy") else DENSE
    return LeaseWish(item.tokens, policy, list(item.prefix_hashes), scratch)


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
