"""SIGHUP: kvd.toml is read again while everything serves."""

import signal
from dataclasses import fields
from pathlib import Path

from tests.daemon.raw_worker import RawWorker
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd_daemon.settings import FIXED, LATER, Settings


def reload(kvd: RunningKvd) -> None:
    kvd.process.send_signal(signal.SIGHUP)


def test_limits_and_levels_change_without_a_restart(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('log_level = "info"\n')
    with running_kvd(tmp_path, "--config", str(config)) as kvd:
        pid = kvd.daemon_pid()
        config.write_text('log_level = "warning"\n')
        reload(kvd)
        eventually(lambda: "SIGHUP: the settings were read again" in kvd.log.read_text(), "the reload")
        config.write_text('log_level = "warning"\ndevices = 3\n')
        reload(kvd)
        eventually(lambda: "devices cannot change while kvd runs" in kvd.log.read_text(), "the second reload")
        config.write_text('log_levle = "warning"\n')
        reload(kvd)
        eventually(lambda: "did you mean log_level?" in kvd.log.read_text(), "the third reload")
        assert kvd.log.read_text().count("read again") == 1, "no more talk at that level"
        with RawWorker(kvd.run_dir) as worker:
            assert worker.status().pid == pid
            assert f"session {worker.opened.session_id}" not in kvd.log.read_text()


def test_a_bad_file_changes_nothing_and_is_logged(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('log_level = "info"\n')
    with running_kvd(tmp_path, "--config", str(config)) as kvd, RawWorker(kvd.run_dir) as worker:
        epoch = worker.status().epoch
        config.write_text('log_levle = "debug"\n')
        reload(kvd)
        eventually(lambda: "did you mean log_level?" in kvd.log.read_text(), "the complaint")
        assert "SIGHUP: nothing is changed" in kvd.log.read_text()
        assert worker.status().epoch == epoch


def test_memory_and_devices_stay_as_they_are(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('host_memory = "64MiB"\n')
    with running_kvd(tmp_path, "--host-memory", "64MiB", "--config", str(config)) as kvd:
        config.write_text("devices = 3\n")
        reload(kvd)
        eventually(lambda: "devices cannot change while kvd runs" in kvd.log.read_text(), "the note")
        with RawWorker(kvd.run_dir) as worker:
            assert worker.status().memory_bytes == 64 << 20


def test_what_does_not_count_at_once_is_named_in_the_words_of_the_file(tmp_path: Path) -> None:
    config, spill = tmp_path / "kvd.toml", tmp_path / "spill"
    spill.mkdir()
    config.write_text("")
    with running_kvd(tmp_path, "--config", str(config)) as kvd:
        tiers = f'host_tier = "1MiB"\nspill_dir = "{spill}"\nspill_size = "1MiB"\n'
        config.write_text(tiers + 'session_ttl = "20s"\nkernel_threads = 2\nlog_level = "warning"\n')
        reload(kvd)
        fixed = "SIGHUP: host_tier, spill_dir, spill_size cannot change while kvd runs"
        eventually(lambda: fixed in kvd.log.read_text(), "what stays")
        later = "SIGHUP: session_ttl, kernel_threads: for daemons that start later"
        eventually(lambda: later in kvd.log.read_text(), "what comes later")
        assert "log_level" not in kvd.log.read_text()


def test_every_setting_counts_at_once_or_is_told() -> None:
    at_once = {"drain_timeout_ns", "eviction", "log_level", "access", "limits", "pools", "tenants"}
    assert {field.name for field in fields(Settings)} == at_once | set(FIXED) | set(LATER)
