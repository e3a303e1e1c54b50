"""Hypothesis strategies for protobuf messages, built from their descriptors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 5  # no message of kvd nests deeper
MAX_REPEATED = 4  # items; long lists have tests of their own
LIKELY_WEIGHT = 6  # of a likely value against an arbitrary one: several must be right at once to get far
UINT32 = st.one_of(st.integers(0, 200), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]))
UINT64 = st.one_of(st.integers(0, 200), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))

SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: UINT32,
    FieldDescriptor.TYPE_UINT64: UINT64,
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_STRING: st.text(max_size=40),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
}

Likely = Mapping[str, st.SearchStrategy[Any]]
"""By field name: values that get past the first check, to be mixed with arbitrary ones."""


def any_message(descriptor: Descriptor, likely: Likely, depth: int = MAX_DEPTH) -> st.SearchStrategy[Message]:
    """Messages of that type. Of a oneof one member or none is set; submessages mostly are; scalars may be."""
    free = [field for field in descriptor.fields if field.containing_oneof is None]
    always = [field for field in free if field.message_type is not None or field.name in likely]
    fields = st.fixed_dictionaries(
        {field.name: _value(field, likely, depth) for field in always},
        optional={field.name: _value(field, likely, depth) for field in free if field not in always},
    )
    choices = [_one_member(oneof, likely, depth) for oneof in descriptor.oneofs]
    return st.builds(partial(_built, descriptor), fields, *choices)


def _one_member(oneof: OneofDescriptor, likely: Likely, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    members = [st.fixed_dictionaries({field.name: _value(field, likely, depth)}) for field in oneof.fields]
    return st.one_of(*members, st.just({}))


def _built(descriptor: Descriptor, *parts: dict[str, Any]) -> Message:
    values = {name: value for part in parts for name, value in part.items()}
    return GetMessageClass(descriptor)(**values)


def _value(field: FieldDescriptor, likely: Likely, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        if depth == 0:
            return st.just(GetMessageClass(field.message_type)())
        single: st.SearchStrategy[Any] = any_message(field.message_type, likely, depth - 1)
    else:
        single = SCALARS[field.type]
        if field.name in likely:
            single = st.one_of(*[likely[field.name]] * LIKELY_WEIGHT, single)
    return st.lists(single, max_size=MAX_REPEATED) if field.is_repeated else single
