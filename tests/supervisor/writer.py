"""A worker of the library whose bytes tell whether they are its own."""

from pathlib import Path

import numpy as np

import kvd_client

SPEC = kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_size=16)
TOKENS = 40  # at a time


class Writer:
    """One lease in pool "chat" of one device."""

    def __init__(self, run_dir: Path, device: str) -> None:
        self.client = kvd_client.connect(run_dir / device)
        self.pool = self.client.pool("chat", SPEC, blocks=64)
        self.lease = self.pool.lease(lease_ahead=0)
        self.written = np.zeros((2, 0, 2, 8), np.float32)
        self.grow()

    def grow(self) -> None:
        """The daemon must be asked for it."""
        slots = self.lease.extend(TOKENS)
        fresh = np.random.default_rng(self.lease.length).standard_normal((2, TOKENS, 2, 8), np.float32)
        for layer in range(2):
            self.lease.write(layer, slots, fresh[layer], -fresh[layer])
        self.lease.commit(TOKENS)
        self.written = np.concatenate([self.written, fresh], axis=1)

    def check(self) -> None:
        """The same lease has the same bytes, and can still grow."""
        self.grow()
        for layer in range(2):
            keys, values = self.lease.gather(layer, "numpy")
            np.testing.assert_array_equal(keys, self.written[layer])
            np.testing.assert_array_equal(values, -self.written[layer])

    def close(self) -> None:
        self.client.close()
