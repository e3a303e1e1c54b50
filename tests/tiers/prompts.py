"""A prompt whose blocks are cached, copied and evicted."""

from tests.client.daemon import Daemon
from tests.running_kvd import eventually

import kvd_client

from .contents import Contents, contents, prefill

BLOCKS, BLOCK = 60, 16
PROMPT = list(range(20 * BLOCK + 1))  # twenty blocks, and the token that is never part of a prefix


def prompt(seed: int) -> list[int]:
    return [1000 * seed + token for token in PROMPT]


def sealed(pool: kvd_client.Pool, seed: int = 0) -> Contents:
    """A prompt (another one for each seed) was computed and let go."""
    with pool.lease(prompt=prompt(seed)) as lease:
        assert lease.prefix_tokens == 0
        prefill(lease, len(PROMPT) - 1, seed)
        lease.seal_prompt()
        return contents(lease)


def evict(pool: kvd_client.Pool, daemon: Daemon, copies: int = 20) -> None:
    """Others need all of the pool, after the prompt's blocks were copied."""
    pressure = pool.lease(tokens=34 * BLOCK)
    eventually(lambda: daemon.pool_status(pool.name).blocks_copied >= copies, "copies of cached blocks")
    pressure.release()
    with pool.lease(tokens=(BLOCKS - 1) * BLOCK):
        assert daemon.pool_status(pool.name).blocks_cached <= 1  # the pool's reserve


def assert_begins(lease: kvd_client.Lease, before: Contents) -> None:
    """What was found of a prompt, if anything, is what it was."""
    found = lease.prefix_tokens
    if found:
        for (k, v), (k_before, v_before) in zip(contents(lease), before, strict=True):
            assert (k == k_before[:found]).all()
            assert (v == v_before[:found]).all()
