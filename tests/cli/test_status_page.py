"""The page an operator opens first, from the messages a daemon sends."""

import re
import time

import pytest

from kvd.errors import DeviceUnavailableError
from kvd.v1 import kvd_pb2 as pb
from kvd_client.cli import records
from kvd_client.cli.screen import Screen
from kvd_client.cli.status_page import page

SPEC = pb.KVSpec(
    layers=30,
    kv_heads=3,
    head_dim_k=64,
    head_dim_v=64,
    dtype="bfloat16",
    block_size=16,
    layout="block_outermost",
    backend="generic",
)
BLOCK_BYTES = 30 * 3 * 128 * 2 * 16
POOL = pb.PoolStatus(
    pool=pb.Pool(name="chat", spec=SPEC, blocks_total=1001, block_bytes=BLOCK_BYTES, pool_id="p1"),
    blocks_free=600,
    blocks_leased=250,
    blocks_sealed=100,
    blocks_cached=49,
    blocks_quarantined=1,
    sink_blocks_locked=12,
    leases=14,
    compressions=34,
    blocks_saved=1024,
    tokens_dropped=16_384,
    populated_bytes=1001 * BLOCK_BYTES,
    total_bytes=1001 * BLOCK_BYTES,
)


def status(pool: pb.PoolStatus = POOL, health: str = "serving", detail: str = "") -> pb.GetStatusResponse:
    message = pb.GetStatusResponse(
        device="host0",
        device_kind="host",
        memory_bytes=1 << 30,
        memory_used_bytes=1 << 28,
        health=health,
        health_detail=detail,
        sessions=2,
        pools=[pool],
        pid=4711,
        epoch="e1",
        version="0.1.0",
    )
    message.start_time.FromSeconds(int(time.time()) - 3 * 3600)
    return message


def shown(message: pb.GetStatusResponse, screen: Screen) -> str:
    pools = [records.pool_status_record(message.device, pool) for pool in message.pools]
    return "\n".join(page([records.device_record(message)], pools, screen))


def test_tiers_are_on_the_page_where_there_are_some() -> None:
    message = status()
    assert "tier" not in shown(message, Screen())
    message.host_tier_bytes, message.host_tier_used_bytes = 4 << 30, 1 << 30
    assert "  1 GiB of 4 GiB in the host tier\n" in shown(message, Screen())
    message.disk_tier_bytes = 64 << 30
    assert "  1 GiB of 4 GiB in the host tier, 0 B of 64 GiB in the disk tier\n" in shown(message, Screen())


def test_the_header_says_whether_the_device_serves_and_how_full_it_is() -> None:
    text = shown(status(), Screen())
    assert text.startswith("host0  serving  256 MiB of 1 GiB in pools (25.0 %), 2 sessions, up 3h")
    assert "host, pid 4711, kvd 0.1.0, epoch e1" in text


def test_counts_and_percentages_read_without_colour() -> None:
    legend = shown(status(), Screen()).splitlines()[5:8]
    words, counts, percents = (re.findall(r"[\w.,]+ ?%?", line) for line in legend)
    assert [word.strip() for word in words] == ["leased", "sealed", "cached", "quarantined", "free"]
    assert [count.strip() for count in counts] == ["250", "100", "49", "1", "600"]
    assert percents == ["25.0 %", "10.0 %", "4.9 %", "0.1 %", "60.0 %"]


def test_every_state_has_a_mark_of_its_own_in_the_bar() -> None:
    bar = shown(status(), Screen(unicode=False)).splitlines()[4].strip()
    assert re.fullmatch(r"\[#+=+-+!\.+\]", bar)
    assert bar.count("#") == 24  # of 96 cells


def test_it_says_what_compression_saved_and_what_is_locked() -> None:
    text = shown(status(), Screen())
    assert "14, 12 sink blocks locked" in text
    assert "360 MiB in 34 compressions (1,024 blocks, 16,384 tokens dropped)" in text


def test_population_shows_only_while_it_lasts() -> None:
    filling = pb.PoolStatus()
    filling.CopyFrom(POOL)
    filling.populated_bytes = 1001 * BLOCK_BYTES // 2
    assert "50.0 %: 176 MiB backed by memory so far" in shown(status(filling), Screen())
    assert "populated" not in shown(status(), Screen())


def test_what_health_follows_from_is_told_where_it_is_known() -> None:
    probed = status()
    assert "kernel worker" not in shown(probed, Screen())
    probed.kernel_pid = 4712
    probed.lease_probe_age.FromMilliseconds(420)
    probed.kernel_probe_age.FromMilliseconds(1_250)
    line = shown(probed, Screen()).splitlines()[2]
    assert line == "  kernel worker 4712, heard 1.2 s ago; lease probed 0.4 s ago"
    probed.kernel_restarts = 2
    assert "kernel worker 4712 (2 before it), heard" in shown(probed, Screen())
    record = records.device_record(probed)
    assert (record["kernel_pid"], record["kernel_restarts"]) == (4712, 2)
    assert (record["lease_probe_age_seconds"], record["kernel_probe_age_seconds"]) == (0.42, 1.25)


def test_a_device_that_does_not_serve_says_why() -> None:
    text = shown(status(health="failing", detail="pool chat: block 7 has two owners"), Screen())
    assert text.startswith("host0  failing")
    assert "pool chat: block 7 has two owners" in text


def test_a_device_that_does_not_answer_has_the_same_fields_with_nothing_in_them() -> None:
    record = records.unreachable_record("host1", DeviceUnavailableError("no daemon answers"))
    assert record.keys() == records.device_record(status()).keys()
    assert (record["health"], record["health_detail"], record["pid"]) == (
        "unreachable",
        "no daemon answers",
        None,
    )
    assert page([record], [], Screen()) == ["host1  unreachable", "  no daemon answers"]


def test_a_device_without_pools_says_how_to_make_one() -> None:
    text = "\n".join(page([records.device_record(status())], [], Screen()))
    assert "kvctl pool create" in text


def test_nothing_is_wider_than_80_columns_or_than_a_page_is_read() -> None:
    wide = [len(line) for line in shown(status(), Screen(width=80)).splitlines()]
    assert max(wide) <= 80
    assert max(len(line) for line in shown(status(), Screen(width=300)).splitlines()) <= 100


def test_colour_changes_no_character() -> None:
    plain, painted = (shown(status(), Screen(80, colour)) for colour in (False, True))
    assert "\x1b[" in painted
    assert re.sub("\x1b\\[[0-9;]*m", "", painted) == plain


def test_a_pools_blocks_add_up_in_its_record() -> None:
    record = records.pool_status_record("host0", POOL)
    states = ("free", "leased", "sealed", "cached", "quarantined", "null")
    assert sum(record[f"blocks_{state}"] for state in states) == record["blocks_total"]


def test_calls_that_wait_for_blocks_are_on_the_page() -> None:
    pool = pb.PoolStatus()
    pool.CopyFrom(POOL)
    assert "waiting" not in shown(status(pool), Screen())
    pool.waiting_calls, pool.wanted_blocks = 1, 1200
    assert "waiting    1 call for 1,200 blocks: kvctl tenant list" in shown(status(pool), Screen())


def test_what_became_of_the_last_daemon_is_one_line_unless_there_was_none() -> None:
    def line(**found: object) -> list[str]:
        message = status()
        message.recovery.CopyFrom(pb.Recovery(**found))
        return [line.strip() for line in shown(message, Screen()).splitlines() if "daemon" in line]

    assert line(state="fresh") == []
    assert line(state="recovered", sessions=1, leases=12) == [
        "went on after another daemon with 1 session and 12 leases"
    ]
    assert line(state="recovered", lost_leases=2, lost_pools=1) == [
        "went on after another daemon with 0 sessions and 0 leases, 2 leases and 1 pool lost"
    ]
    assert line(state="volatile") == ["runs without the supervisor kvd: nothing outlives this daemon"]
    assert line(state="quarantined", detail="the daemon's record 7 cannot be read") == [
        "began empty: the daemon's record 7 cannot be read"
    ]


@pytest.mark.parametrize("width", [30, 34, 40, 55, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_however_narrow(width: int) -> None:
    message = status(health="failing")
    message.pools[0].pool.name = "chat-of-team-blue"
    message.kernel_pid = 4712
    lines = shown(message, Screen(width)).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    (bar,) = (line for line in lines if line.startswith("  ["))
    assert len(bar) == min(width, 100)
    assert sum("600" in line for line in lines) == 1  # the free blocks
    words = " ".join(shown(message, Screen(100)).split()[:20])
    assert " ".join(" ".join(lines).split()).startswith(words)


def test_in_a_narrow_terminal_each_state_has_a_line() -> None:
    legend = shown(status(), Screen(40)).splitlines()
    assert [" ".join(line.split()) for line in legend if "%" in line and "pools" not in line] == [
        "█ leased 250 25.0 %",
        "▓ sealed 100 10.0 %",
        "▒ cached 49 4.9 %",
        "! quarantined 1 0.1 %",
        "· free 600 60.0 %",
    ]
