"""A worker that holds as many sessions as the pool lets it: dense ones, or compressed ones.

No model runs here: a session's keys and values are those that the reader's model made of its prompt, byte for
byte, and every compression is a real one.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

import kvd_client
from kvd_client import CompressionReport, Lease, PoolExhaustedError, Span
from kvd_demo.demo.pool import CALL_TIMEOUT_S, KEEP, POOL, tell

POLICY = Span(keep=KEEP)


class Tenant:
    """What it holds, and the orders it takes: one word a line on stdin."""

    def __init__(self, client: kvd_client.Client, prompt_file: Path) -> None:
        self._pool = client.pool(POOL)
        prompt = np.load(prompt_file)
        self._kv, self._queries, self._tokens = prompt["kv"], prompt["queries"], int(prompt["tokens"])
        self._leases: list[Lease] = []

    def fill_dense(self) -> None:
        """Lease for one whole prompt after the other until the pool has no room."""
        while (lease := self._lease()) is not None:
            self._leases.append(lease)
            tell("session", sessions=len(self._leases))
        tell("full", sessions=len(self._leases))

    def compress_all(self) -> None:
        """Prune every session; its blocks are free at once, for anybody."""
        for lease in self._leases:
            report = self._compress(lease)
            tell("compressed", before=report.blocks_before, after=report.blocks_after)
        tell("done", fingerprint=self._fingerprint())

    def fill_compressed(self) -> None:
        """Lease for a whole prompt, prune it, and so on until the pool has no room for one more prompt."""
        while (lease := self._lease()) is not None:
            self._leases.append(lease)
            self._compress(lease)
            tell("session", sessions=len(self._leases))
        tell("full", sessions=len(self._leases), blocks=sum(lease.block_table.size for lease in self._leases))

    def check(self) -> None:
        """Whether the bytes it holds are the ones it wrote."""
        tell("checked", fingerprint=self._fingerprint())

    def _lease(self) -> Lease | None:
        try:
            lease = self._pool.lease(self._tokens, POLICY, lease_ahead=0)
        except PoolExhaustedError:
            return None
        for layer, planes in enumerate(self._kv):
            for plane, content in zip(self._pool.layer(layer, "numpy"), planes, strict=True):
                plane[lease.block_table] = content
        lease.commit(self._tokens)
        return lease

    def _compress(self, lease: Lease) -> CompressionReport:
        return lease.compress(queries=self._queries)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for lease in self._leases:
            for layer in range(self._pool.spec.layers):
                for plane in self._pool.layer(layer, "numpy"):
                    digest.update(plane[lease.block_table].tobytes())
        return digest.hexdigest()


def main() -> None:
    with kvd_client.connect(name=sys.argv[1], timeout=CALL_TIMEOUT_S) as client:
        tenant = Tenant(client, Path(sys.argv[2]))
        orders = {
            "dense": tenant.fill_dense,
            "compress": tenant.compress_all,
            "compressed": tenant.fill_compressed,
            "check": tenant.check,
        }
        tell("ready")
        for line in sys.stdin:
            orders[line.strip()]()


if __name__ == "__main__":
    main()
