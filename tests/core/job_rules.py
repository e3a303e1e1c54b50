"""Compressions and observations: begun, finished, aborted, lost. The kernel worker is played here."""

from hypothesis.stateful import precondition, rule

from kvd import errors as e
from kvd.policy import H2O, Policy, Span, Streaming
from kvd_daemon.core import CompressPlan, QueryShape, Unchanged

from .driver import POLICIES, Chance, Driver, Refusal, any_lease, anything
from .quota_rules import Shortage
from .world import WorldLease


class JobRules(Driver):
    """begin, finish and abort, with queries in a scratch lease or without."""

    @precondition(any_lease)
    @rule(chance=anything)
    def compress(self, chance: Chance) -> None:
        policy, tokens = chance.choice([None, *POLICIES]), chance.randint(1, 4)
        lease = self.a_lease(chance, busy=False, scratch=False, streams=False)
        session = self.owner(lease, chance)
        queries = self.queries(lease, tokens, chance)
        park = chance.random() < 0.4
        error = self.refusal(session, lease) or self.compress_refusal(session, lease, policy, queries)
        if error is None and park:
            error = self.checkpoint_refusal(lease, policy or lease.policy)
        plan = self.ask(
            error,
            lambda: self.device.begin_compress(
                session, self.progress(lease), policy, queries, self.world.now, park
            ),
        )
        if plan is None:
            return
        self.world.learn(lease)
        wanted = self.target(lease, policy or lease.policy)
        assert isinstance(plan, Unchanged) == (lease.streams or wanted >= len(lease.slots))
        if isinstance(plan, CompressPlan):
            assert bool(plan.slots.size) == (park and not lease.checkpoint)
            self.take_slots(lease, plan.slots.tolist())
            self.begin_compress(lease, plan, queries)

    def checkpoint_refusal(self, lease: WorldLease, policy: Policy) -> Refusal:
        """There must be slots, where there is something to prune and no checkpoint yet."""
        if lease.streams or lease.checkpoint or self.target(lease, policy) >= len(lease.slots):
            return None
        return self.stow_refusal(lease, -(-len(lease.slots) // self.world.pool_of(lease).block_size))

    def queries(self, lease: WorldLease, tokens: int, chance: Chance) -> QueryShape | None:
        if chance.random() < 0.1:
            return None
        heads = self.world.pool_of(lease).kv_heads * (2 if chance.random() < 0.9 else 0)
        lenders = [x for x in self.world.leases.values() if x.scratch and x.session == lease.session]
        lender = chance.choice([None, *[x.lease_id for x in lenders]])
        return QueryShape(tokens, heads, lender)

    def target(self, lease: WorldLease, policy: Policy) -> int:
        return policy.target_tokens(len(lease.slots), self.world.pool_of(lease).block_size)

    def queries_refusal(self, session: str, lease: WorldLease, queries: QueryShape) -> Refusal:
        if queries.query_heads == 0:
            return e.InvalidArgumentError
        if queries.scratch_lease_id is None:
            return None
        lender = self.world.leases[queries.scratch_lease_id]
        if lender.session != session:
            return e.NotOwnerError
        return e.InvalidArgumentError if lender.pool != lease.pool else self.world.fate_error(lender)

    def compress_refusal(
        self, session: str, lease: WorldLease, policy: Policy | None, queries: QueryShape | None
    ) -> Refusal:
        if lease.scratch:
            return e.InvalidArgumentError
        error = queries and self.queries_refusal(session, lease, queries)
        policy = policy or lease.policy
        if error or lease.streams:
            return error or (None if isinstance(policy, Streaming) else e.InvalidArgumentError)
        try:
            tokens = self.target(lease, policy)
        except e.InvalidArgumentError:
            return e.InvalidArgumentError
        if tokens >= len(lease.slots):
            return None
        scores = isinstance(policy, H2O) and not lease.observed
        if queries is None and (policy.needs_queries or scores):
            return e.InvalidArgumentError
        if isinstance(policy, H2O) and queries and queries.tokens > len(lease.slots) - lease.observed:
            return e.InvalidArgumentError
        if isinstance(policy, H2O) and queries and self.shares_scores(lease):
            return e.InvalidArgumentError
        return self.room_refusal(lease, policy, tokens)

    def shares_scores(self, lease: WorldLease) -> bool:
        named = self.world.pool_of(lease).names.values()
        nameless = any(block not in named for block in lease.table[: lease.sealed])
        return nameless and bool(lease.observed or lease.compressed)

    def room_refusal(self, lease: WorldLease, policy: Policy, tokens: int) -> Refusal:
        if lease.sealed == 0 or (isinstance(policy, Span) and policy.granularity == "block"):
            return None
        wanted = -(-tokens // self.world.pool_of(lease).block_size)
        holders = self.world.holders(lease.pool)
        alone = sum(len(holders[block]) == 1 for block in lease.table[: lease.sealed])
        if len(lease.table) - lease.sealed + alone < wanted:
            return e.CompressionRefusedError
        resting = lease.fate == "resting"
        ordinary, scratch = (0, wanted) if resting else (wanted, 0)
        lacking = Shortage(self.world, lease.tenant, lease.pool, ordinary, scratch).lacks_room()
        return e.PoolExhaustedError if lacking else None

    def begin_compress(self, lease: WorldLease, plan: CompressPlan, queries: QueryShape | None) -> None:
        pool, blocks = self.world.pool_of(lease), plan.destination.tolist()
        used = -(-len(lease.slots) // pool.block_size)
        assert plan.source.tolist() == lease.table[:used]
        if plan.in_place:
            assert blocks == lease.table[: len(blocks)]
            assert Shortage(self.world, lease.tenant, lease.pool, len(blocks)).lacks_room()
        elif not plan.by_block:
            self.world.take(lease, blocks)
            lease.destination = blocks
            self.check_scrub(lease, plan)
            for block in blocks[:1]:  # what an aborted job leaves behind
                pool.write(block, 0, (lease.tenant, "half moved", 0))
        self.plans[lease.lease_id] = plan
        self.voted = self.voted - {lease.lease_id} | ({lease.lease_id} if queries else set())
        self.make_busy(lease, queries)

    def check_scrub(self, lease: WorldLease, plan: CompressPlan) -> None:
        pool = self.world.pool_of(lease)
        listed = {block for start, count in plan.scrub for block in range(start, start + count)}
        assert listed <= set(lease.destination)
        for block in lease.destination:
            written = {token[0] for token in pool.content.get(block, []) if token}
            assert written <= {lease.tenant} or block in listed
        pool.zero(plan.scrub[1:])  # an aborted job may also have scrubbed only some

    def make_busy(self, lease: WorldLease, queries: QueryShape | None) -> None:
        lease.busy = True
        if queries is not None and queries.scratch_lease_id is not None:
            self.lent[lease.lease_id] = queries.scratch_lease_id
            self.world.leases[queries.scratch_lease_id].busy = True

    @precondition(lambda self: self.plans)
    @rule(chance=anything)
    def finish_compress(self, chance: Chance) -> None:
        lease_id = chance.choice(list(self.plans))
        lease, plan = self.world.leases[lease_id], self.plans.pop(lease_id)
        before = len(lease.slots), len(lease.table)
        sums = self.checkpointed(lease, plan.source.tolist())
        if plan.by_block:
            kept = self.kept_blocks(lease, plan, chance)
            self.ask(
                e.InvalidArgumentError, lambda: self.device.finish_compress(lease_id, [*kept[::-1], 0], sums)
            )
            self.drop_blocks(lease, kept)
            done = self.device.finish_compress(lease_id, kept, sums)
        else:
            wrong = plan.target_tokens + 1
            self.ask(e.InvalidArgumentError, lambda: self.device.finish_compress(lease_id, wrong, sums))
            self.move_tokens(lease, plan, chance)
            done = self.device.finish_compress(lease_id, plan.target_tokens, sums)
        assert (done.tokens_before, done.blocks_before) == before
        assert (done.tokens_kept, done.blocks_after) == (len(lease.slots), len(lease.table))
        lease.gave += before[1] - len(lease.table) if lease.fate == "resting" else 0
        lease.compressed = len(lease.slots)
        lease.observed = len(lease.slots) if isinstance(plan.policy, H2O) else 0
        lease.generation += 1
        self.world.learn(lease)
        self.end_job(lease)

    def kept_blocks(self, lease: WorldLease, plan: CompressPlan, chance: Chance) -> list[int]:
        block_size, length = self.world.pool_of(lease).block_size, len(lease.slots)
        must = set(range(-(-plan.policy.sinks // block_size)))
        must |= set(range((length - plan.window) // block_size, plan.source.size))
        others = sorted(set(range(plan.source.size)) - must)
        return sorted([*must, *chance.sample(others, plan.target_tokens // block_size - len(must))])

    def drop_blocks(self, lease: WorldLease, kept: list[int]) -> None:
        size = self.world.pool_of(lease).block_size
        lease.slots = [p for i, p in enumerate(lease.slots) if i // size in kept]
        lease.sealed = sum(i < lease.sealed for i in kept)
        lease.table = [lease.table[i] for i in kept]

    def move_tokens(self, lease: WorldLease, plan: CompressPlan, chance: Chance) -> None:
        """Sinks and window and whatever else stay, in order; they are written where the plan says."""
        pool, length = self.world.pool_of(lease), len(lease.slots)
        must = {*range(min(plan.policy.sinks, length)), *range(length - plan.window, length)}
        assert len(must) <= plan.target_tokens < length
        others = sorted(set(range(length)) - must)
        kept = sorted([*must, *chance.sample(others, plan.target_tokens - len(must))])
        pool.zero(plan.scrub)
        for new, old in enumerate(kept):
            block, offset = divmod(old, pool.block_size)
            token = pool.read(lease.table[block], offset)
            block, offset = divmod(new, pool.block_size)
            pool.write(plan.destination.tolist()[block], offset, token)
        lease.slots = [lease.slots[old] for old in kept]
        lease.table, lease.sealed, lease.destination = plan.destination.tolist(), 0, []

    @precondition(lambda self: self.plans or self.observed)
    @rule(chance=anything)
    def abort_job(self, chance: Chance) -> None:
        lease_id = chance.choice([*self.plans, *self.observed])
        plan = self.plans.get(lease_id)
        lost = plan.in_place if plan is not None else chance.choice([True, False])
        lease = self.world.leases[lease_id]
        if plan is not None and lost and lease.stowed:
            return self.suspended_instead(lease, plan)
        self.device.abort_compress(lease_id, lost)
        self.job_aborted(lease_id, lost)

    def suspended_instead(self, lease: WorldLease, plan: CompressPlan) -> None:
        """Its bytes are lost, but were copied before."""
        self.fill_slots(lease, plan.source.tolist())
        sums = [self.sum_of(slot) for slot in lease.stowed]
        too_many = [*sums, 1]
        self.ask(e.InvalidArgumentError, lambda: self.device.abort_compress(lease.lease_id, True, too_many))
        self.device.abort_compress(lease.lease_id, True, sums)
        del self.plans[lease.lease_id]
        lease.parked, lease.stowed = lease.stowed, []
        lease.table, lease.sealed, lease.destination, lease.fate = [], 0, [], "suspended"
        self.end_job(lease)

    def job_aborted(self, lease_id: int, lost: bool) -> None:
        plan, lease = self.plans.pop(lease_id, None), self.world.leases[lease_id]
        self.observed.discard(lease_id)
        self.world.drop_slots(lease, "stowed")
        lease.destination = []
        if plan is None:  # an observation: only the sums are lost
            lease.observed = 0 if lost else lease.observed
        else:
            lease.fate = "lost" if lost else lease.fate
            if isinstance(plan.policy, H2O) and lease_id in self.voted:
                lease.observed = 0
        self.end_job(lease)

    @precondition(any_lease)
    @rule(chance=anything)
    def observe(self, chance: Chance) -> None:
        tokens = chance.randint(1, 5)
        lease = self.a_lease(chance, busy=False, streams=False, sealed=0)
        session = self.owner(lease, chance)
        queries = self.queries(lease, tokens, chance) or QueryShape(tokens, 6)
        error = self.refusal(session, lease)
        if error is None and (lease.scratch or lease.streams or lease.sealed):
            error = e.InvalidArgumentError
        error = error or self.queries_refusal(session, lease, queries)
        if error is None and tokens > len(lease.slots) - lease.observed:
            error = e.InvalidArgumentError
        if self.ask(
            error,
            lambda: self.device.begin_observe(session, self.progress(lease), queries, self.world.now),
        ):
            self.world.learn(lease)
            self.observed.add(lease.lease_id)
            self.make_busy(lease, queries)

    @precondition(lambda self: self.observed)
    @rule(chance=anything)
    def finish_observe(self, chance: Chance) -> None:
        lease_id = chance.choice(sorted(self.observed))
        self.observed.discard(lease_id)
        lease = self.world.leases[lease_id]
        lease.observed = len(lease.slots)
        self.device.finish_observe(lease_id)
        self.end_job(lease)

    def end_job(self, lease: WorldLease) -> None:
        self.world.job_ended(lease)
        lender = self.lent.pop(lease.lease_id, None)
        if lender is not None:
            self.world.job_ended(self.world.leases[lender])
