"""Small parts by themselves: settings, sizes, replies, frames, available memory, run dirs."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgumentError, RequestReusedError
from kvd.run_dir import default_run_dir
from kvd_daemon.device.available import available_bytes
from kvd_daemon.engine.requests import Call, Requests
from kvd_daemon.journal import RecordingDevice, Reply
from kvd_daemon.journal.replies import Replies
from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel import wire
from kvd_daemon.settings import Settings, parse_bytes, parse_duration_ns, read_toml, settings_from


@pytest.mark.parametrize(
    ("text", "byte_count"),
    [("2GiB", 2 << 30), ("2 gib", 2 << 30), ("1.5G", 3 << 29), ("10MB", 10_000_000), ("4096", 4096)],
)
def test_sizes_are_read_as_people_write_them(text: str, byte_count: int) -> None:
    assert parse_bytes(text) == byte_count


@pytest.mark.parametrize(("text", "ns"), [("30s", 30 * 10**9), ("500ms", 5 * 10**8), ("2m", 120 * 10**9)])
def test_durations_are_read_as_people_write_them(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_an_invalid_argument(text: str) -> None:
    with contextlib.suppress(InvalidArgumentError):
        assert parse_bytes(text) >= 0


def test_later_settings_win_and_travel_as_json() -> None:
    chosen = settings_from({"host_memory": "1GiB", "devices": 2}, {"devices": 3})
    settings = Settings(**chosen)  # type: ignore[arg-type]
    assert (settings.host_memory_bytes, settings.devices) == (1 << 30, 3)
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("value", ["two", 0, -1, True, 1.5])
def test_a_setting_outside_its_limits_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="devices"):
        Settings(host_memory_bytes=1 << 30, devices=value)  # type: ignore[arg-type]


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text("host_memory =")
    with pytest.raises(InvalidArgumentError, match="is no TOML"):
        read_toml(path)


def test_the_run_dir_comes_from_the_environment_or_the_user() -> None:
    assert default_run_dir({"KVD_RUN_DIR": "/x"}, 0) == Path("/x")
    assert default_run_dir({"XDG_RUNTIME_DIR": "/run/user/5"}, 0) == Path("/run/kvd")
    assert default_run_dir({"XDG_RUNTIME_DIR": "/run/user/5"}, 5) == Path("/run/user/5/kvd")
    assert default_run_dir({}, 5) == Path("/tmp/kvd-5")


def machine(root: Path, cgroup: str, **files: str) -> Path:
    """A /proc and /sys/fs/cgroup with 8 GiB available to the machine."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for path, text in files.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_machines_memory_counts_where_no_cgroup_limits_it(tmp_path: Path) -> None:
    files = {"a/memory.max": "max\n", "a/memory.current": "5\n"}
    assert available_bytes(machine(tmp_path, "0::/a\n", **files)) == 8 << 30


def test_the_tightest_cgroup_counts_and_its_file_cache_is_free(tmp_path: Path) -> None:
    files = {
        "memory.max": f"{4 << 30}\n",
        "memory.current": f"{1 << 30}\n",
        "a/memory.max": f"{2 << 30}\n",
        "a/memory.current": f"{1 << 30}\n",
        "a/memory.stat": f"anon 5\ninactive_file {1 << 29}\n",
    }
    assert available_bytes(machine(tmp_path, "0::/a\n", **files)) == 3 << 29


def test_the_older_cgroups_count_too(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": f"{1 << 30}\n",
        "memory/a/memory.usage_in_bytes": f"{1 << 29}\n",
    }
    assert available_bytes(machine(tmp_path, "4:memory:/a\n0::/\n", **files)) == 1 << 29


def test_replies_forget_the_oldest_first() -> None:
    replies, found = Replies(limit=2), []
    for name in ("a", "b", "c", "b", "a"):
        found.append(replies.find("session", name) is not None)
        if not found[-1]:
            replies.keep(Reply("session", name, b"", "Lease", name.encode()), {"session"})
    assert found == [False, False, False, True, False]


def test_replies_of_sessions_that_are_over_are_forgotten() -> None:
    replies = Replies()
    replies.keep(Reply("old", "a", b"", "Lease", b""), {"old"})
    replies.keep(Reply("new", "a", b"", "Lease", b""), {"new"})
    assert [reply.session_id for reply in replies.kept(["old", "new"])] == ["new"]


def test_a_failed_request_is_not_remembered_also_if_it_fails_later() -> None:
    async def story() -> None:
        requests = Requests(RecordingDevice(1 << 20))
        call = Call("session", "a", b"1", "LeaseRequest")
        failing: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        assert requests.known(call) is None
        requests.begins(call, failing)
        assert requests.known(call) is failing
        with pytest.raises(RequestReusedError):
            requests.known(replace(call, digest=b"2"))
        failing.set_exception(ValueError("no"))
        await asyncio.sleep(0)
        assert requests.known(replace(call, digest=b"2")) is None

    asyncio.run(story())


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 2**31), st.text(max_size=50))
def test_a_frame_brings_back_what_was_sent(ids: list[int], number: int, text: str) -> None:
    sent = m.Observe(
        pool_id=text,
        source=np.array(ids, np.int32),
        length=number,
        position=number,
        compressed_length=0,
        observed_length=0,
    )
    frame = wire.encode(sent)
    header_bytes, body_bytes = wire.sizes(frame[: wire.PREFIX.size])
    body_at = wire.PREFIX.size + header_bytes
    received = wire.decode(frame[wire.PREFIX.size : body_at], frame[body_at : body_at + body_bytes])
    assert isinstance(received, m.Observe)
    assert received.source.tolist() == ids
    assert (received.pool_id, received.length) == (text, number)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_nonsense_is_a_wire_error(header: bytes, body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(header, body)
    with pytest.raises(wire.WireError):
        wire.sizes(wire.PREFIX.pack(wire.MAX_HEADER_BYTES + 1, 0))
