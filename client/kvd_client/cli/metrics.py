"""What kvd tells Prometheus: the answers of daemons as families of samples. Needs the extra `metrics`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvd.errors import KvdError
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli.fleet import Answers
from kvd_client.cli.metrics_command import Told

HEALTHS = ("serving", "starting", "draining", "failing")
BLOCK_STATES = ("free", "leased", "sealed", "cached", "quarantined")


@dataclass(frozen=True)
class Series:
    """A field of a message as a metric; `kind` is a gauge's or a counter's family."""

    name: str
    field: str
    text: str
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily


OF_DEVICE = (
    Series("kvd_device_memory_bytes", "memory_bytes", "Bytes the daemon may hand out."),
    Series("kvd_device_memory_used_bytes", "memory_used_bytes", "Bytes in pools."),
    Series("kvd_sessions", "sessions", "Connected workers."),
    Series("kvd_host_tier_bytes", "host_tier_bytes", "Host memory that leases may be parked in."),
    Series("kvd_host_tier_used_bytes", "host_tier_used_bytes", "Of that in use."),
    Series("kvd_disk_tier_bytes", "disk_tier_bytes", "Disk behind the host tier."),
    Series("kvd_disk_tier_used_bytes", "disk_tier_used_bytes", "Of that in use."),
    Series(
        "kvd_kernel_worker_restarts",
        "kernel_restarts",
        "Kernel workers that died or were replaced since the daemon started.",
        CounterMetricFamily,
    ),
)
OF_POOL = (
    Series("kvd_pool_bytes", "total_bytes", "Bytes of the pool."),
    Series("kvd_pool_populated_bytes", "populated_bytes", "Of those backed by memory."),
    Series("kvd_pool_blocks_pinned", "blocks_pinned", "Sealed blocks that a match or a pin keeps there."),
    Series("kvd_pool_blocks_copied", "blocks_copied", "Cached blocks with a copy in a tier."),
    Series("kvd_pool_sink_blocks_locked", "sink_blocks_locked", "Blocks that hold sinks of live leases."),
    Series("kvd_pool_leases", "leases", "Live leases."),
    Series("kvd_pool_leases_shelved", "leases_shelved", "Published, not adopted yet."),
    Series("kvd_pool_leases_suspended", "leases_suspended", "Parked in a tier."),
    Series("kvd_pool_parked_bytes", "parked_bytes", "Bytes of the host tier it takes."),
    Series("kvd_pool_spilled_bytes", "spilled_bytes", "Bytes of the disk tier it takes."),
    Series("kvd_pool_waiting_calls", "waiting_calls", "Calls that wait for blocks."),
    Series("kvd_pool_wanted_blocks", "wanted_blocks", "Blocks they want."),
    Series(
        "kvd_pool_match_blocks_asked",
        "match_blocks_asked",
        "Blocks that matches asked for.",
        CounterMetricFamily,
    ),
    Series("kvd_pool_match_blocks_found", "match_blocks_found", "Those that were here.", CounterMetricFamily),
    Series("kvd_pool_compressions", "compressions", "Compressions.", CounterMetricFamily),
    Series("kvd_pool_blocks_saved", "blocks_saved", "Blocks they returned.", CounterMetricFamily),
    Series("kvd_pool_tokens_dropped", "tokens_dropped", "Tokens they dropped.", CounterMetricFamily),
)
OF_TENANT = (
    Series("kvd_tenant_blocks", "blocks", "Blocks its leases hold."),
    Series("kvd_tenant_max_blocks", "max_blocks", "Blocks it may hold; 0: no limit."),
    Series("kvd_tenant_guaranteed_blocks", "guaranteed_blocks", "Blocks of each pool kept free for it."),
    Series("kvd_tenant_pinned_blocks", "pinned_blocks", "Blocks it has pinned for good."),
    Series("kvd_tenant_max_parked_blocks", "max_parked_blocks", "Blocks it may park in tiers; 0: no limit."),
    Series("kvd_tenant_parked_blocks", "parked_blocks", "Blocks it has parked in tiers."),
    Series("kvd_tenant_leases", "leases", "Its leases."),
    Series("kvd_tenant_sessions", "sessions", "Its sessions."),
    Series("kvd_tenant_waiting_calls", "waiting_calls", "Its calls that wait for blocks."),
)


class KvdCollector(Collector):
    """Asks every daemon anew for each scrape: nothing is kept that could be old."""

    def __init__(self, ask: Callable[[], Answers[Told]]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        """Never raises a daemon's silence: it is a sample."""
        try:
            answers = self._ask()
        except KvdError:  # no kvd here, or not yet
            answers = Answers()
        up = GaugeMetricFamily("kvd_up", "Whether the daemon answers.", labels=["device"])
        for device in sorted({*answers.by_device, *answers.failures}):
            up.add_metric([device], float(device in answers.by_device))
        yield up
        told = sorted(answers.by_device.items())
        yield from _health(told)
        yield from _ages(told)
        yield from _families(OF_DEVICE, ["device"], [((device,), status) for device, (status, _) in told])
        pools = [((device, pool.pool.name), pool) for device, (status, _) in told for pool in status.pools]
        yield _blocks(pools)
        yield from _families(OF_POOL, ["device", "pool"], pools)
        tenants = [((device, tenant.tenant), tenant) for device, (_, its) in told for tenant in its]
        yield from _families(OF_TENANT, ["device", "tenant"], tenants)


Labelled = Iterable[tuple[tuple[str, ...], object]]


def _families(series: Iterable[Series], labels: list[str], messages: Labelled) -> Iterator[Metric]:
    for one in series:
        family = one.kind(one.name, one.text, labels=labels)
        for values, message in messages:
            family.add_metric(values, float(getattr(message, one.field)))
        yield family


def _health(told: list[tuple[str, Told]]) -> Iterator[Metric]:
    """As kvctl pool status says it."""
    health = GaugeMetricFamily("kvd_health", "1 for the state the daemon is in.", labels=["device", "state"])
    degraded = GaugeMetricFamily(
        "kvd_degraded",
        "1 if it serves though something is strange: kvctl pool status says what.",
        labels=["device"],
    )
    build = GaugeMetricFamily("kvd_daemon_info", "Always 1.", labels=["device", "kind", "version"])
    for device, (status, _) in told:
        for state in HEALTHS:
            health.add_metric([device, state], float(status.health == state))
        degraded.add_metric([device], float(status.health == "serving" and bool(status.health_detail)))
        build.add_metric([device, status.device_kind, status.version], 1.0)
    yield from (health, degraded, build)


def _ages(told: list[tuple[str, Told]]) -> Iterator[Metric]:
    """What has not happened yet has no sample."""
    started = GaugeMetricFamily("kvd_daemon_start_time_seconds", "Unix time.", labels=["device"])
    lease = GaugeMetricFamily(
        "kvd_lease_probe_age_seconds", "Since a lease round trip succeeded.", labels=["device"]
    )
    kernel = GaugeMetricFamily(
        "kvd_kernel_probe_age_seconds", "Since a kernel worker's succeeded.", labels=["device"]
    )
    for device, (status, _) in told:
        started.add_metric([device], status.start_time.ToNanoseconds() / 1e9)
        if status.HasField("lease_probe_age"):
            lease.add_metric([device], status.lease_probe_age.ToNanoseconds() / 1e9)
        if status.HasField("kernel_probe_age"):
            kernel.add_metric([device], status.kernel_probe_age.ToNanoseconds() / 1e9)
    yield from (started, lease, kernel)


def _blocks(pools: list[tuple[tuple[str, str], pb.PoolStatus]]) -> Metric:
    family = GaugeMetricFamily(
        "kvd_pool_blocks", "Leasable blocks by state; they add up.", labels=["device", "pool", "state"]
    )
    for (device, name), pool in pools:
        for state in BLOCK_STATES:
            family.add_metric([device, name, state], float(getattr(pool, f"blocks_{state}")))
    return family
