"""A trace against a real kvd: blocks are found where the orders say, with their bytes."""

import pytest
from tests.running_kvd import running_kvd
from trace_replay import live, orders, sessions
from trace_replay.made_up import made_up
from trace_replay.requests import Request, accesses, bound

import kvd_client
from kvd.limits import scratch_reserve

CAPACITY = 400  # blocks; above the longest prompt


@pytest.mark.parametrize("order", ["2q", "lru"])
def test_one_worker_finds_what_the_order_finds_without_a_daemon(tmp_path, order) -> None:
    part = made_up(3, ticks=12)
    with running_kvd(tmp_path, "--eviction", order) as kvd:
        measured = live.replay(kvd.run_dir, part, CAPACITY, workers=1, speed=0)
    assert measured.found_blocks == orders.found_blocks(part, CAPACITY, order)
    assert {name: len(calls) for name, calls in measured.calls.items()} == dict.fromkeys(
        ("Match", "Lease", "Seal", "Release"), len(part)
    )


def test_several_workers_find_all_that_was_there_before_where_nothing_is_evicted(tmp_path) -> None:
    part = made_up(3, ticks=12)
    with running_kvd(tmp_path) as kvd:
        measured = live.replay(kvd.run_dir, part, 10_000, workers=3, speed=100)
    known = round(bound(part) * accesses(part))
    assert (
        0.9 * known <= measured.found_blocks <= known
    )  # those served at the same time do not find each other


def test_sessions_are_alive_until_the_next_one_does_not_fit_whole_and_compressed(tmp_path) -> None:
    part, capacity = made_up(3, ticks=12), 200
    with running_kvd(tmp_path) as kvd:
        found = sessions.that_fit(kvd.run_dir, part, capacity)
    assert found["pool_blocks"] == 6400
    assert found["whole"]["sessions"] == fitting(part, capacity, compressed=False)
    assert found["compressed"]["sessions"] == fitting(part, capacity, compressed=True)
    assert found["ratio"] == round(found["compressed"]["sessions"] / found["whole"]["sessions"], 2) > 2
    assert found["whole"]["kept_tokens"] == found["whole"]["prompt_tokens"]


def fitting(part: list[Request], capacity: int, compressed: bool) -> int:
    """Counted: who comes needs room for the whole prompt, who is there has what is left of it."""
    spec, blocks = live.SPEC, sessions.pool_blocks(capacity)
    free = blocks - scratch_reserve(blocks)
    lengths = [request.input_tokens for request in part]
    for number, tokens in enumerate(lengths):
        if spec.blocks_for(tokens) > free:
            return number
        kept = sessions.POLICY.target_tokens(tokens, spec.block_size) if compressed else tokens
        free -= spec.blocks_for(kept)
    raise AssertionError("all of them fit; take more")


def test_a_session_that_holds_the_bytes_of_another_is_noticed(tmp_path) -> None:
    prompts = sessions.Prompts(1000)
    with running_kvd(tmp_path) as kvd, kvd_client.connect(kvd.run_dir) as client:
        pool = client.pool("pool", live.SPEC, 100)
        lease = sessions.written(pool, prompts, 1, 1000)
        sessions.check(lease, prompts, 1, compressed=False)
        lease.compress(sessions.POLICY, prompts.queries)
        sessions.check(lease, prompts, 1, compressed=True)
        _, values = pool.layer(0, "numpy")
        values[lease.block_table[-1], -1, 0, 1] += 1
        with pytest.raises(AssertionError, match="session 1 has other values"):
            sessions.check(lease, prompts, 1, compressed=True)
        with pytest.raises(AssertionError, match="session 2 has other keys"):
            sessions.check(lease, prompts, 2, compressed=True)
