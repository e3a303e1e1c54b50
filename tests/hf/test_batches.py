"""Rows of a batch, a lease each: what transformers answers on its own cache, without a slot for padding."""

import pytest
import torch

from kvd_client import H2O, Dual, InvalidArgumentError, Span, Streaming
from kvd_client.hf import KvdCache

from .tiny import BLOCK_SIZE, CACHE, VOCABULARY, dynamic_cache, forward, some_ids

LENGTHS = (29, 7, 18)  # tokens of the rows' prompts
COLUMNS = max(LENGTHS)
POLICIES = {
    "dual": Dual(window=4, kernel=3, keep=0.5),
    "span by block": Span(window=4, kernel=3, keep=0.5, granularity="block"),
    "h2o": H2O(recent=4, keep=0.5),
}


def padded(lengths=LENGTHS, columns=None):
    """Ids and attention mask [rows, columns], padding left."""
    columns = columns or max(lengths)
    ids = torch.zeros(len(lengths), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, columns - length :] = some_ids(length, seed=row)
        mask[row, columns - length :] = 1
    return ids, mask


def generate(model, ids, mask, new_tokens, cache, **others):
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **{CACHE: cache},
        **others,
    )


def leases_for(pool, policy=None, rows=3):
    return [pool.lease(policy=policy) for _ in range(rows)]


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS + 5], ids=["padded", "padded for all"])
@pytest.mark.parametrize("chunk", [None, 6, 10], ids=["whole prompt", "chunks of 6", "chunks of 10"])
@pytest.mark.parametrize("layout", ["block_outermost", "layer_outermost"])
def test_padded_rows_generate_as_on_a_dynamic_cache_to_the_last_bit(
    make_pool, attached, plain, layout, chunk, columns
):
    ids, mask = padded(columns=columns)
    leases = leases_for(make_pool(layout=layout))
    given = {} if chunk is None else {"prefill_chunk_size": chunk}
    ours = generate(attached, ids, mask, 12, KvdCache(leases), **given)
    theirs = generate(plain, ids, mask, 12, dynamic_cache(plain), **given)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))
    assert [lease.length for lease in leases] == [length + 11 for length in LENGTHS]


def test_rows_of_equal_length_need_no_mask(pool, attached, plain):
    ids = torch.cat([some_ids(20, seed=row) for row in range(3)])
    cache, reference = KvdCache(leases_for(pool)), dynamic_cache(plain)
    for part in ids.split([13, 1, 6], dim=1):
        assert torch.equal(forward(attached, part, cache), forward(plain, part, reference))


def test_sampled_batches_are_those_of_a_dynamic_cache(pool, attached, plain):
    ids, mask = padded()
    torch.manual_seed(3)
    ours = generate(attached, ids, mask, 8, KvdCache(leases_for(pool)), do_sample=True)
    torch.manual_seed(3)
    theirs = generate(plain, ids, mask, 8, dynamic_cache(plain), do_sample=True)
    assert torch.equal(ours.sequences, theirs.sequences)


def test_several_answers_to_each_prompt_take_a_lease_each(pool, attached, plain):
    ids, mask = padded()
    torch.manual_seed(5)
    leases = leases_for(pool, rows=6)
    ours = generate(attached, ids, mask, 6, KvdCache(leases), do_sample=True, num_return_sequences=2)
    torch.manual_seed(5)
    theirs = generate(plain, ids, mask, 6, dynamic_cache(plain), do_sample=True, num_return_sequences=2)
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("name", POLICIES)
def test_each_row_is_compressed_as_it_would_be_alone(pool, attached, name):
    ids, mask = padded()
    leases = leases_for(pool, POLICIES[name])
    cache = KvdCache(leases, compress="after_prefill")
    together = generate(attached, ids, mask, 10, cache)
    assert len(cache.reports) == len(LENGTHS)
    for row, length in enumerate(LENGTHS):
        with pool.lease(policy=POLICIES[name]) as lease:
            alone = KvdCache(lease, compress="after_prefill")
            own = ids[row : row + 1, COLUMNS - length :]
            said = generate(attached, own, torch.ones_like(own), 10, alone)
            assert (leases[row].kept_positions() == lease.kept_positions()).all()
            assert (leases[row].length, leases[row].position) == (lease.length, lease.position)
        assert cache.reports[row].tokens_kept == alone.reports[0].tokens_kept
        for one, other in zip(together.logits, said.logits, strict=True):
            torch.testing.assert_close(one[row], other[0], rtol=0, atol=1e-4)
    assert cache.reports[0].blocks_after < cache.reports[0].blocks_before


def test_a_bounded_row_is_cut_when_it_is_over_and_no_other_row_is(pool, attached):
    ids, mask = padded((40, 9))
    leases = leases_for(pool, Dual(window=4, kernel=3, keep=24), rows=2)
    cache = KvdCache(leases, compress="bounded")
    generate(attached, ids, mask, 8, cache)
    assert leases[1].length == leases[1].position == 9 + 7
    assert leases[0].length < 24 + BLOCK_SIZE < leases[0].position == 40 + 7


@pytest.mark.parametrize("rope", ["original", "cache"])
def test_streaming_rows_see_what_they_would_see_alone(pool, attached, rope):
    policy = Streaming(4, 13, rope=rope)
    lengths = (40, 5, 21)
    ids, mask = padded(lengths)
    leases = leases_for(pool, policy)
    together = generate(attached, ids, mask, 30, KvdCache(leases))
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, max(lengths) - length :]
        with pool.lease(policy=policy) as lease:
            said = generate(attached, own, torch.ones_like(own), 30, KvdCache(lease))
        for one, other in zip(together.logits, said.logits, strict=True):
            torch.testing.assert_close(one[row], other[0], rtol=0, atol=1e-4)
    assert {lease.block_table.size for lease in leases} == {policy.capacity_blocks(BLOCK_SIZE)}


def test_a_second_turn_with_padding_between_its_turns_goes_on(pool, attached):
    """The shorter answer of the first turn leaves padding in the middle, which takes no slot either."""
    cache = KvdCache(leases_for(pool, rows=2))
    first_ids, first_mask = padded((8, 5))
    forward(attached, first_ids, cache, attention_mask=first_mask, position_ids=positions(first_mask))
    turn_ids, turn_mask = padded((6, 2))
    mask = torch.cat((first_mask, turn_mask), 1)
    logits = forward(attached, turn_ids, cache, attention_mask=mask, position_ids=positions(mask)[:, 8:])
    assert [lease.length for lease in cache.leases] == [14, 7]
    alone = torch.cat((first_ids[1:, 3:], turn_ids[1:, 4:]), 1)
    torch.testing.assert_close(logits[1, -2:], forward(attached, alone)[0, -2:], rtol=0, atol=1e-4)


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def test_rows_may_share_prefixes_of_different_lengths(pool, attached, plain):
    prefix = some_ids(4 * BLOCK_SIZE, seed=9)
    hashes = [bytes([block]) * 32 for block in range(4)]
    with pool.lease() as first:
        forward(attached, prefix, KvdCache(first))
        first.seal(hashes)
        ids, mask = padded((4 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 3))
        ids[0, : 4 * BLOCK_SIZE] = prefix
        ids[1, 2 * BLOCK_SIZE : 4 * BLOCK_SIZE] = prefix[0, : 2 * BLOCK_SIZE]
        leases = [pool.lease(prefix=hashes), pool.lease(prefix=hashes[:2])]
        ours = generate(attached, ids, mask, 6, KvdCache(leases))
        theirs = generate(plain, ids, mask, 6, dynamic_cache(plain))
        assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-4)


def test_a_full_pool_takes_no_row_of_a_step(client, attached):
    from kvd_client import KVSpec, PoolExhaustedError

    from .tiny import pool_spec

    assert isinstance(pool_spec(), KVSpec)
    small = client.pool("tiny-small", pool_spec(), 4)
    leases = leases_for(small, rows=2)
    cache = KvdCache(leases)
    forward(attached, some_ids(BLOCK_SIZE).repeat(2, 1), cache)
    ids = some_ids(2 * BLOCK_SIZE).repeat(2, 1)
    with pytest.raises(PoolExhaustedError):
        forward(attached, ids, cache)
    assert [lease.length for lease in leases] == [BLOCK_SIZE] * 2
    assert [lease.block_table.size for lease in leases] in ([1, 1], [2, 2])


def test_a_batch_needs_an_attached_model_and_as_many_leases_as_rows(pool, attached, plain):
    ids = torch.cat([some_ids(4), some_ids(4)])
    with pytest.raises(InvalidArgumentError, match=r"attach\(model\) first"):
        forward(plain, ids, KvdCache(leases_for(pool, rows=2)))
    with pytest.raises(InvalidArgumentError, match=r"is \(2, 2, 16, 16\), the leases have \(3, 2, 16, 16\)"):
        forward(attached, ids, KvdCache(leases_for(pool)))


def test_leases_that_make_no_batch_are_refused(pool, client):
    from .tiny import pool_spec

    lease = pool.lease()
    other = client.pool("tiny-other", pool_spec(), 4).lease()
    for leases, why in [
        ([], "without leases"),
        ([lease, lease], "one lease for two"),
        ([lease, other], "several pools"),
    ]:
        with pytest.raises(InvalidArgumentError, match=why):
            KvdCache(leases)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda mask: mask[:, :-1], r"attention_mask of shape \[2, 8\]; \[2, 9\] is needed"),
        (lambda mask: torch.ones_like(mask), "what was padding stays padding"),
        (lambda mask: None, "what was padding stays padding"),
        (
            lambda mask: torch.ones(2, 1, 1, 9, dtype=torch.bool),
            r"attention_mask \[rows, columns\] is needed",
        ),
    ],
    ids=["too short", "padding shown", "no mask", "four dimensions"],
)
def test_a_mask_that_does_not_fit_the_leases_is_refused_and_changes_nothing(pool, attached, change, why):
    cache = KvdCache(leases_for(pool, rows=2))
    ids, mask = padded((8, 5))
    forward(attached, ids, cache, attention_mask=mask)
    grown = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
    one_more = torch.randint(0, VOCABULARY, (2, 1))
    with pytest.raises(InvalidArgumentError, match=why):
        forward(attached, one_more, cache, attention_mask=change(grown))
    assert [(lease.length, lease.capacity) for lease in cache.leases] == [(8, 16), (5, 16)]
    forward(attached, one_more, cache, attention_mask=grown)


def test_a_cache_of_several_rows_has_no_lease_of_its_own(pool):
    cache = KvdCache(leases_for(pool))
    assert len(cache.leases) == 3
    with pytest.raises(InvalidArgumentError, match="see `leases`"):
        cache.lease  # noqa: B018 - the look is what is refused
