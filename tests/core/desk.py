"""A device with one pool and two workers, and short words for what tests ask of it."""

from dataclasses import replace

from kvd.policy import Dense, Policy
from kvd.spec import KVSpec
from kvd_daemon.core import Device, Lease, LeaseWish, Limits, Pool, Progress, QueryShape, SessionIdentity

SPEC = KVSpec(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=8, block_size=16)
TTL = 1_000
QUERIES = QueryShape(tokens=32, query_heads=4)


class Desk:
    """`ann` and `ben` belong to tenant red, `cat` to blue. Every call happens at `now`."""

    def __init__(self, blocks: int = 64, spec: KVSpec = SPEC, limits: Limits | None = None) -> None:
        self.now = 0
        self.device = Device(1 << 40, limits or Limits())
        self.pool: Pool = self.device.create_pool("pool", spec, blocks, "id")[0]
        for name, tenant in (("ann", "red"), ("ben", "red"), ("cat", "blue")):
            self.device.open_session(SessionIdentity(name, tenant, 1, 1, name), TTL, 0)

    def lease(self, tokens: int, policy: Policy | None = None, who: str = "ann", **more: object) -> Lease:
        """One lease; blocks of another tenant are scrubbed at once."""
        wish = replace(LeaseWish(tokens, policy or Dense()), **more)
        granted = self.device.lease(who, "pool", [wish], self.now)
        if granted.scrub:
            self.device.scrubbed([lease.lease_id for lease in granted.leases])
        return granted.leases[0]

    def prefill(self, tokens: int, policy: Policy | None = None, who: str = "ann", **more: object) -> Lease:
        """A lease whose tokens are written and told."""
        lease = self.lease(tokens, policy, who, **more)
        self.extend(lease, 0, tokens)
        return lease

    def progress(self, lease: Lease, length: int | None = None) -> Progress:
        """Where the lease is, or would be with `length` slots in use."""
        length = lease.length if length is None else length
        return Progress(lease.lease_id, lease.generation, length, lease.position + length - lease.length)

    def extend(self, lease: Lease, tokens: int, length: int | None = None) -> Lease:
        items = [(self.progress(lease, length), tokens)]
        extended = self.device.extend(lease.session_id, items, self.now)
        if extended.scrub:
            self.device.scrubbed([lease.lease_id])
        return lease

    def compress(self, lease: Lease, policy: Policy | None = None, queries: QueryShape | None = QUERIES):
        return self.device.begin_compress(lease.session_id, self.progress(lease), policy, queries, self.now)

    def seal(self, lease: Lease, hashes: list[bytes]):
        return self.device.seal(lease.session_id, self.progress(lease), hashes)

    def names(self, count: int, text: int = 0) -> list[bytes]:
        """Hashes of a text's leading blocks."""
        return [bytes([text, depth]).ljust(32, b".") for depth in range(count)]
