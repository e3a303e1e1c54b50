"""Health by itself: what makes it green, red and green again."""

from kvd_daemon.engine.health import LATE_S, Health, HealthState


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def serving() -> tuple[Health, Clock]:
    clock = Clock()
    health = Health(clock)
    health.kernel(None)
    health.lease_tried(None)
    return health, clock


def test_it_starts_until_the_kernel_worker_and_a_lease_were_there() -> None:
    health = Health()
    assert (health.state, health.detail) == (HealthState.STARTING, "the kernel worker starts")
    health.kernel(None)
    assert (health.state, health.detail) == (HealthState.STARTING, "no lease was tried yet")
    assert health.lease_age_s is None
    health.lease_tried(None)
    assert (health.state, health.detail) == (HealthState.SERVING, "")


def test_it_fails_as_long_as_the_kernel_worker_is_in_trouble() -> None:
    health, _ = serving()
    health.kernel("kernel worker 7 died; another one starts")
    assert (health.state, health.detail) == (
        HealthState.FAILING,
        "kernel worker 7 died; another one starts",
    )
    health.kernel(None)
    assert health.state is HealthState.SERVING


def test_one_lease_that_fails_is_forgiven_and_five_seconds_without_one_are_not() -> None:
    health, clock = serving()
    health.lease_tried("UNAVAILABLE: no socket")
    assert health.state is HealthState.SERVING
    clock.now_s += LATE_S + 1
    assert health.state is HealthState.FAILING
    assert "UNAVAILABLE: no socket" in health.detail
    assert health.lease_age_s == LATE_S + 1
    health.lease_tried(None)
    assert (health.state, health.lease_age_s) == (HealthState.SERVING, 0.0)


def test_a_daemon_that_never_granted_a_lease_fails_in_the_end() -> None:
    clock = Clock()
    health = Health(clock)
    health.kernel(None)
    health.lease_tried("no answer within 4 s")
    assert health.state is HealthState.STARTING
    clock.now_s += LATE_S + 1
    assert health.state is HealthState.FAILING
    assert health.lease_age_s is None


def test_who_listens_is_told_what_time_alone_has_changed_and_nothing_twice() -> None:
    health, clock = serving()
    told: list[HealthState] = []
    health.listen(lambda: told.append(health.state))
    health.look()
    clock.now_s += LATE_S + 1
    health.look()
    health.look()
    health.lease_tried(None)
    assert told == [HealthState.FAILING, HealthState.SERVING]


def test_a_long_stall_is_told_and_makes_nothing_red() -> None:
    health, _ = serving()
    health.stalled(0.4)
    assert health.detail == ""
    health.stalled(2.34)
    assert health.state is HealthState.SERVING
    assert health.detail == "the event loop was stuck for 2.3 s within the last minute"


def test_a_finding_stays_red_and_a_drain_is_told_before_all() -> None:
    health, _ = serving()
    health.find("two and two were five")
    health.find("and three")
    assert (health.state, health.detail) == (HealthState.FAILING, "two and two were five")
    health.drain()
    assert health.state is HealthState.DRAINING
    health.resume()
    assert health.state is HealthState.FAILING
