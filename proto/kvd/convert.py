"""Between the wire's messages and the vocabulary of `kvd.spec` and `kvd.policy`."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvd import policy as p
from kvd.arguments import shown
from kvd.errors import InvalidArgumentError
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb


def spec_to_proto(spec: KVSpec) -> pb.KVSpec:
    return pb.KVSpec(**spec.__dict__)


def spec_from_proto(message: pb.KVSpec) -> KVSpec:
    """Raises InvalidArgumentError on values outside the limits of kvd.spec."""
    return KVSpec(
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim_k=message.head_dim_k,
        head_dim_v=message.head_dim_v,
        dtype=message.dtype,
        block_size=message.block_size,
        layout=message.layout,
        backend=message.backend,
    )


def keep_to_proto(keep: "p.Keep | float | int") -> pb.Keep:
    keep = p.Keep.of(keep)
    if keep.ratio is not None:
        return pb.Keep(ratio=pb.Ratio(numerator=keep.ratio.numerator, denominator=keep.ratio.denominator))
    assert keep.tokens is not None
    return pb.Keep(tokens=keep.tokens)


def keep_from_proto(message: pb.Keep) -> p.Keep:
    """Raises InvalidArgumentError if it is no ratio in (0, 1] and no positive number of tokens."""
    if message.WhichOneof("amount") == "tokens":
        if message.tokens < 1:
            raise InvalidArgumentError("keep.tokens is 0; at least one token must be kept")
        return p.Keep(tokens=message.tokens)
    ratio = message.ratio
    if not 1 <= ratio.numerator <= ratio.denominator <= p.MAX_KEEP_DENOMINATOR:
        raise InvalidArgumentError(f"keep {ratio.numerator}/{ratio.denominator} is no ratio in (0, 1]")
    return p.Keep(ratio=Fraction(ratio.numerator, ratio.denominator))


def policy_to_proto(policy: p.Policy) -> pb.Policy:
    """Raises InvalidArgumentError if it is none."""
    match policy:
        case p.Dense():
            return pb.Policy(dense=pb.DensePolicy())
        case p.Streaming(sinks, window, rope):
            return pb.Policy(streaming=pb.StreamingPolicy(sinks=sinks, window=window, rope=rope))
        case p.SnapKV(window, kernel, pooling, keep, sinks):
            return pb.Policy(
                snapkv=pb.SnapKVPolicy(
                    sinks=sinks, window=window, kernel=kernel, pooling=pooling, keep=keep_to_proto(keep)
                )
            )
        case p.H2O(recent, keep, sinks):
            return pb.Policy(h2o=pb.H2OPolicy(sinks=sinks, recent=recent, keep=keep_to_proto(keep)))
        case p.KeyDiff(recent, keep, sinks):
            return pb.Policy(keydiff=pb.KeyDiffPolicy(sinks=sinks, recent=recent, keep=keep_to_proto(keep)))
        case p.ExpectedAttention(recent, keep, sinks):
            expected = pb.ExpectedAttentionPolicy(sinks=sinks, recent=recent, keep=keep_to_proto(keep))
            return pb.Policy(expected=expected)
        case p.Span(window, kernel, keep, granularity, sinks):
            return pb.Policy(
                span=pb.SpanPolicy(
                    sinks=sinks,
                    window=window,
                    kernel=kernel,
                    keep=keep_to_proto(keep),
                    granularity=granularity,
                )
            )
    raise InvalidArgumentError(f"{shown(policy)} is no policy; pass one such as kvd_client.SnapKV()")


def policy_from_proto(message: pb.Policy) -> p.Policy:
    """Unset means dense. Raises InvalidArgumentError on values the policy refuses."""
    kind = message.WhichOneof("kind")
    if kind == "streaming":
        streaming = message.streaming
        return p.Streaming(streaming.sinks, streaming.window, streaming.rope)
    if kind == "snapkv":
        snap = message.snapkv
        return p.SnapKV(snap.window, snap.kernel, snap.pooling, keep_from_proto(snap.keep), snap.sinks)
    if kind == "h2o":
        return p.H2O(message.h2o.recent, keep_from_proto(message.h2o.keep), message.h2o.sinks)
    if kind == "keydiff":
        diff = message.keydiff
        return p.KeyDiff(diff.recent, keep_from_proto(diff.keep), diff.sinks)
    if kind == "expected":
        expected = message.expected
        return p.ExpectedAttention(expected.recent, keep_from_proto(expected.keep), expected.sinks)
    if kind == "span":
        span = message.span
        return p.Span(span.window, span.kernel, keep_from_proto(span.keep), span.granularity, span.sinks)
    return p.Dense()


def runs_to_proto(block_ids: "npt.NDArray[np.int32]") -> list[pb.BlockRun]:
    """Consecutive ids become one run each, in order."""
    if block_ids.size == 0:
        return []
    one_run = block_ids.size == 1 or bool((block_ids[1:] - block_ids[:-1] == 1).all())
    if one_run:  # by far the most frequent, and on the way of every lease
        return [pb.BlockRun(start=int(block_ids[0]), count=block_ids.size)]
    breaks = np.flatnonzero(np.diff(block_ids) != 1) + 1
    starts = block_ids[np.concatenate(([0], breaks))]
    counts = np.diff(np.concatenate(([0], breaks, [block_ids.size])))
    return [pb.BlockRun(start=s, count=c) for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]


def runs_from_proto(runs: Iterable[pb.BlockRun]) -> "npt.NDArray[np.int32]":
    """The ids the runs stand for, in order."""
    parts = [np.arange(run.start, run.start + run.count, dtype=np.int32) for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
