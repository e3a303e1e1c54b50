"""The systemd unit says what this kvd understands."""

import configparser
import shlex
from pathlib import Path

from kvd_daemon.cli import build_parser

UNIT = Path(__file__).resolve().parents[2] / "docker/kvd.service"


def test_the_unit_starts_kvd_with_options_it_has_and_keeps_its_descriptors() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text().replace("Environment=FDSTORE", "FdStore=FDSTORE"))
    service = unit["Service"]
    _, *arguments = shlex.split(service["ExecStart"])
    assert build_parser().parse_args(arguments).config == "/etc/kvd.toml"
    assert service["FdStore"] == f"FDSTORE={service['FileDescriptorStoreMax']}"
    assert service["RuntimeDirectoryPreserve"] == "restart", "journals go when descriptors go"
    assert service["KillMode"] == "mixed", "daemons take SIGTERM for a restart"
