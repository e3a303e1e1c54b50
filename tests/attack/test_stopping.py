"""A daemon that is stopped in the middle of work."""

from pathlib import Path

from tests.running_kvd import start_kvd

import kvd_client


def test_stopping_under_a_live_session_is_no_incident(tmp_path: Path) -> None:
    kvd = start_kvd(tmp_path, "--host-memory", "256MiB")
    try:
        kvd.wait_until_ready()
        with kvd_client.connect(kvd.run_dir) as client:
            assert client.session_id
            kvd.stop()
        assert "Traceback" not in kvd.log.read_text()
    finally:
        kvd.kill()
