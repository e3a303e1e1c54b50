"""Names of blocks against a dict of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_daemon.core.names import Names, Node, key_of

TOTAL = 6  # blocks and the null block: 16 places, so that names often meet at one
TENANTS, TEXTS = (1, 2, 30_000), [bytes([text]) * 32 for text in range(12)]
NODES = st.builds(Node, st.sampled_from(TENANTS), st.sampled_from(TEXTS), st.sampled_from([b"", *TEXTS]))


def copy_of(name: bytes) -> bytes:
    return bytes(bytearray(name))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, TOTAL - 1), NODES), max_size=60))
def test_names_are_found_as_in_a_dict_whatever_came_and_went_before(steps) -> None:
    names, model = Names(TOTAL), dict[int, Node]()
    for block_id, node in steps:
        taken = any((other.tenant, other.prefix_hash) == node[:2] for other in model.values())
        if block_id in model:
            gone = model.pop(block_id)
            assert names.remove(block_id) == key_of(gone.tenant, gone.prefix_hash)
        elif not taken:
            model[block_id] = node
            assert names.add(block_id, node) == key_of(node.tenant, node.prefix_hash)
        check(names, model)
    check(Names.of(TOTAL, model), model)


def check(names: Names, model: dict[int, Node]) -> None:
    block_of = {(node.tenant, node.prefix_hash): block_id for block_id, node in model.items()}
    assert dict(names) == model
    assert [block_id in names for block_id in range(TOTAL)] == [
        block_id in model for block_id in range(TOTAL)
    ]
    for tenant in TENANTS:
        for name in TEXTS:
            assert names.find(tenant, copy_of(name)) == block_of.get((tenant, name))
    for block_id, node in model.items():
        assert names.before(block_id) == block_of.get((node.tenant, node.parent_hash))
        assert names.leading(node.tenant, [copy_of(node.prefix_hash), b"?" * 32]) == [block_id]


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(1, TOTAL)), st.lists(st.sampled_from(TEXTS), max_size=4))
def test_a_run_is_found_up_to_the_first_name_that_is_missing(blocks, asked) -> None:
    names, parent = Names(TOTAL), b""
    for block_id, name in zip(blocks, TEXTS, strict=False):
        names.add(block_id, Node(1, name, parent))
        parent = name
    known = dict(zip(TEXTS, blocks, strict=False))
    missing = next((i for i, name in enumerate(asked) if name not in known), len(asked))
    assert names.leading(1, list(map(copy_of, asked))) == [known[name] for name in asked[:missing]]
    assert names.leading(2, asked) == []
    assert names.parents([known[name] for name in TEXTS[1:4]]) == TEXTS[:3]


def test_a_parent_is_the_very_object_that_names_its_block() -> None:
    """Or each hash would be kept twice."""
    names, first, second = Names(TOTAL), TEXTS[0], TEXTS[1]
    names.add(3, Node(1, first, b""))
    names.add(4, Node(2, second, b""))
    names.add(1, Node(1, second, copy_of(first)))
    assert names.parent(1) is first
    image = names.image()
    nodes = {b: Node(1, copy_of(image.hashes[b]), copy_of(image.parents[b])) for b in (1, 3)}
    restored = Names.of(TOTAL, nodes)
    assert restored.parent(1) is restored.node(3).prefix_hash
