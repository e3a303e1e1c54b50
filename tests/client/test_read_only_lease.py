"""A lease that was adopted in a read-only pool is read, given on or released; nothing else."""

import numpy as np
import pytest

import kvd_client
from kvd_client import Lease, aio

from .daemon import Daemon

ARGUMENTS = {
    "extend": (1,),
    "observe": (np.zeros((2, 8, 4, 16), np.float32),),
    "seal": ([b"h" * 32],),
}
LOCAL_CHANGES = {"commit", "write"}
GIVING_UP = {"publish", "transfer", "release"}


@pytest.mark.parametrize("change", sorted(aio.AWAITED[Lease] - GIVING_UP | LOCAL_CHANGES))
def test_whatever_would_change_it_is_refused_before_anything_is_sent(
    client: kvd_client.Client, daemon: Daemon, new_pool, spec, change: str
) -> None:
    pool = new_pool(spec)
    reader = client.pool(pool.name, read_only=True)
    with pool.lease(tokens=64) as lease:
        lease.commit(20)
        lease.publish("key")
    with reader.adopt("key") as adopted:
        adopted.prompt_hashes = [b"h" * 32]
        row = np.zeros((1, 2, 16), np.float32)
        given = {"write": (0, [16], row, row), "commit": (1,)} | ARGUMENTS
        before = adopted.handle.state, daemon.lease_info(adopted.lease_id)
        with pytest.raises(kvd_client.ReadOnlyError, match="for reading alone"):
            getattr(adopted, change)(*given.get(change, ()))
        assert (adopted.handle.state, daemon.lease_info(adopted.lease_id).state) == (before[0], "active")
        assert daemon.lease_info(adopted.lease_id).length == before[1].length
