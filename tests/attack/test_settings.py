"""A kvd.toml that is wrong leaves nothing behind, least of all a folder."""

from pathlib import Path

import pytest

from kvd_daemon.cli import main
from kvd_daemon.supervisor import OPERATOR_MISTAKE


@pytest.mark.parametrize("line", ["run_dir = true", "run_dir = 5", "devices = 0\nrun_dir = 'here'"])
def test_a_wrong_kvd_toml_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kvd.toml").write_text(f"host_memory = '64MiB'\n{line}\n")
    with pytest.raises(SystemExit) as ended:
        main(["--config", "kvd.toml"])
    assert ended.value.code == OPERATOR_MISTAKE
    assert " is needed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kvd.toml"]
