"""Values as bytes: what comes back is what went in, type by type, and nonsense is refused."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.snapshot import snapshot

from kvd.policy import H2O, Dense, Dual, Keep, SnapKV, Span, Streaming
from kvd_daemon.core import LeaseState, LeaseWish, Progress
from kvd_daemon.core.lease import Compacting, Scrubbing, Standing, Target
from kvd_daemon.journal.codec import CLASSES, ENUMS, SCHEMA, CodecError, Decoder, encode, pieces
from kvd_daemon.journal.records import EVENTS

KEEPS = st.one_of(st.integers(2, 10**6), st.floats(0.01, 1.0)).map(Keep.of)
POLICIES = st.one_of(
    st.just(Dense()),
    st.builds(Streaming, st.integers(0, 9), st.integers(1, 9)),
    st.builds(SnapKV, st.integers(1, 9), st.just(3), keep=KEEPS),
    st.builds(Dual, keep=KEEPS),
    st.builds(H2O, st.integers(0, 9), KEEPS),
    st.builds(Span, st.integers(1, 9), st.just(3), KEEPS),
)
ARRAYS = st.lists(st.integers(0, 255), max_size=20).flatmap(
    lambda items: st.sampled_from([np.uint8, np.int32, np.uint64]).map(lambda kind: np.array(items, kind))
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    st.fractions(),
    st.sampled_from(LeaseState),
    ARRAYS,
    POLICIES,
    st.builds(
        LeaseWish, st.integers(), POLICIES, st.lists(st.binary(min_size=32, max_size=32)), st.booleans()
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=20),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), inner, max_size=20),
    ),
    max_leaves=20,
)


def typed(value: object) -> object:
    """Comparable, with every type in it."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, typed(list(value.items()))
    return type(value), getattr(value, "dtype", None), snapshot(value)


@given(VALUES)
def test_what_is_read_is_what_was_written(value: object) -> None:
    assert typed(Decoder().decode(encode(value))) == typed(value)


@given(VALUES)
def test_what_is_written_in_pieces_is_read_too(value: object) -> None:
    assert typed(Decoder().decode(b"".join(pieces(value)))) == typed(value)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16), st.integers(1, 40))
def test_long_lists_of_numbers_and_of_hashes_take_little_room(numbers: list[int], size: int) -> None:
    hashes = [bytes([n % 256]) * size for n in numbers]
    assert len(encode(numbers)) < 8 * len(numbers) + 16
    assert len(encode(hashes)) < size * len(hashes) + 16
    assert Decoder().decode(encode([numbers, hashes])) == [numbers, hashes]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    try:
        values = Decoder().decode_all(data)
    except CodecError:
        return
    assert len(values) <= len(data)


@given(VALUES, st.data())
def test_changed_bytes_are_a_value_or_an_error(value: object, data: st.DataObject) -> None:
    written = bytearray(encode(value))
    for at in data.draw(st.lists(st.integers(0, len(written) - 1), min_size=1, max_size=3)):
        written[at] = data.draw(st.integers(0, 255))
    try:
        Decoder().decode_all(bytes(written))
    except CodecError:
        return


def test_values_inside_values_have_a_limit() -> None:
    with pytest.raises(CodecError):
        Decoder().decode(b"l\x01\x00\x00\x00" * 1000 + b"N")


def test_jobs_under_way_are_values() -> None:
    target = Target(SnapKV(), 5, 2, 1, by_block=False, in_place=True, adds_scores=False)
    ids = np.arange(3, dtype=np.int32)
    jobs = [Scrubbing(ids, Standing(ids, 1, 2, 3, 4), (5, 6)), Compacting(target, ids, None)]
    assert snapshot(Decoder().decode(encode(jobs))) == snapshot(jobs)


def test_what_cannot_be_read_back_as_it_was_is_not_written() -> None:
    for value in (np.int32(5), {1, 2}, object(), types.SimpleNamespace()):
        with pytest.raises(KeyError):
            encode(value)


def test_an_earlier_version_that_knew_fewer_fields_is_read() -> None:
    earlier = [
        (name, [each for each in names if each not in ("scratch", "pin_id", "floor")])
        for name, names in SCHEMA
    ]
    code = next(i for i, (name, _) in enumerate(SCHEMA) if name == "LeaseWish")
    written = b"o" + bytes([code]) + encode(5) + encode(Dense()) + encode(())
    assert Decoder(earlier).decode(written) == LeaseWish(5)


@pytest.mark.parametrize("schema", [[("Unheard", [])], [("Progress", ["lease_id", "mood"])]])
def test_fields_and_classes_nobody_knows_are_refused(schema: list[tuple[str, list[str]]]) -> None:
    with pytest.raises(CodecError, match="unknown"):
        Decoder(schema)


PLAIN = {int, str, bytes, bool, float, type(None), Fraction, np.ndarray}


def leaves(hint: object) -> set[object]:
    """The types that a value of that annotation is made of."""
    if dataclasses.is_dataclass(hint):
        return {hint}.union(*map(leaves, typing.get_type_hints(hint).values()))
    arguments = [each for each in typing.get_args(hint) if each is not Ellipsis]
    if typing.get_origin(hint) is np.ndarray:
        return {np.ndarray}
    if arguments:
        return set().union(*map(leaves, arguments))
    return {hint}


@pytest.mark.parametrize("name", EVENTS)
def test_every_argument_of_an_event_is_of_types_that_can_be_written(name: str) -> None:
    hints = typing.get_type_hints(EVENTS[name])
    hints.pop("return")
    for hint in hints.values():
        assert typing.get_origin(hint) in (None, Sequence, Mapping, types.UnionType, typing.Union), hint
        assert leaves(hint) <= PLAIN | set(CLASSES) | set(ENUMS), hint


def test_a_policy_of_a_lease_is_written_as_its_own_class() -> None:
    for policy in (Dual(), SnapKV()):
        assert type(Decoder().decode(encode(policy))) is type(policy)
    assert Decoder().decode(encode(Progress(1, 2, 3, 4))) == Progress(1, 2, 3, 4)
