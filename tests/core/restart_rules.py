"""Daemons die and others take over, from nothing but an image of the device."""

from hypothesis.stateful import rule

from kvd_daemon.core import Device, Losses, Tier
from kvd_daemon.core.image import capture, restore

from .copy_rules import CopyRules
from .driver import MEMORY_BYTES, TTL, Chance, anything
from .job_rules import JobRules
from .lease_rules import LeaseRules

GRACE = TTL // 2


class RestartRules(LeaseRules, JobRules, CopyRules):
    """Every job is undone or lost; some processes and some memory are gone; the others go on."""

    @rule(chance=anything)
    def another_daemon_takes_over(self, chance: Chance) -> None:
        self.device = self.successor()
        pools = [name for name in self.world.pools if chance.random() < 0.2]
        sessions = [name for name in self.world.sessions if chance.random() < 0.2]
        grace = chance.choice([0, GRACE, 3 * TTL])
        busy = [*self.plans, *self.observed]
        arenas = [name for name in self.world.pools if chance.random() < 0.2]
        disks = [name for name in self.world.pools if chance.random() < 0.2]
        losses = Losses(pools, sessions, arenas, disks)
        recovered = self.device.recover(self.world.now, grace, losses)
        self.jobs_ended()
        self.world.drop_copies(Tier.HOST, arenas)
        self.world.drop_copies(Tier.DISK, disks)
        for lease in self.world.leases.values():
            pools_without = {Tier.HOST: arenas, Tier.DISK: disks}
            if lease.checkpoint and lease.pool in pools_without[lease.checkpoint[0][0]]:
                self.world.drop_slots(lease, "checkpoint")
            if lease.parked and lease.pool in pools_without[lease.parked[0][0]]:
                self.world.lose_parked(lease)
        for name in sessions:
            self.world.end_session(name)
        for name in pools:
            self.world.lose_pool(name)
        for session in self.world.sessions.values():
            if session.state != "expired":
                session.state, session.expires = "detached", self.world.now + max(TTL, grace)
        for pin in self.world.pins.values():
            if pin.session:
                pin.expires = max(pin.expires, self.world.now + grace)
        for lease in self.world.shelf().values():
            lease.shelved.expires = max(lease.shelved.expires, self.world.now + grace)
        assert {each.session_id for each in recovered.sessions} == set(self.world.sessions)
        assert [pool.name for pool in recovered.lost_pools] == pools
        fates = {lease_id: lease.fate for lease_id, lease in self.world.leases.items()}
        assert {each.lease_id for each in recovered.leases} == {
            lease_id
            for lease_id, fate in fates.items()
            if fate in ("active", "resting", "shelved", "suspended")
        }
        newly = {x for x in busy if fates.get(x) == "lost"}
        assert newly <= {each.lease_id for each in recovered.lost_leases}

    def jobs_ended(self) -> None:
        for lease_ids, _, saved in self.scrubs:
            self.scrub_undone([self.world.leases[lease_id] for lease_id in lease_ids], saved)
        self.scrubs.clear()
        for lease_id in [*self.plans, *self.observed]:
            plan = self.plans.get(lease_id)
            self.job_aborted(lease_id, lost=plan is None or plan.in_place)
        for *_, target, _ in self.world.moves.values():
            self.world.drop_target(target)
        self.world.moves.clear()
        self.world.forget_copying()
        for lease_id in list(self.stows):
            self.suspend_undone(lease_id)
        for lease_id in list(self.fetches):
            self.fetch_undone(lease_id)

    def successor(self) -> Device:
        """A device that goes on where this one is."""
        return twin(self.device)


def twin(device: Device) -> Device:
    made = Device(MEMORY_BYTES, device.limits)
    restore(capture(device).plain(), made)
    return made
