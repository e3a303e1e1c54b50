"""What kvd.toml may say about tenants."""

from pathlib import Path

import pytest

from kvd.errors import InvalidArgumentError
from kvd_daemon.settings import Settings, read_toml, settings_from
from kvd_daemon.tenant_quotas import MAX_TENANT_TABLES

GIB = 1 << 30


def settings(folder: Path, text: str) -> Settings:
    path = folder / "kvd.toml"
    path.write_text(f'host_memory = "1GiB"\n{text}')
    return Settings(**settings_from(read_toml(path)))  # type: ignore[arg-type]


def test_quotas_of_tenants_are_read_and_travel_to_the_daemons(tmp_path: Path) -> None:
    read = settings(
        tmp_path,
        """
        [tenants.search]
        guaranteed_blocks = 100
        max_blocks = 4000
        pin_blocks = 50
        [tenants."uid:1000"]
        max_blocks = 10
        [tenants."*"]
        max_blocks = 500
        """,
    )
    assert read.tenants == {
        "search": {"guaranteed_blocks": 100, "max_blocks": 4000, "pin_blocks": 50},
        "uid:1000": {"max_blocks": 10},
        "*": {"max_blocks": 500},
    }
    assert Settings.from_json(read.to_json()) == read


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tenants.a]\nmax_block = 1", "unknown key in .*'max_block'; did you mean max_blocks?"),
        ("[tenants.a]\nmax_blocks = 0", "max_blocks is 0; a number of blocks from 1"),
        ("[tenants.a]\nmax_parked_blocks = 0", "max_parked_blocks is 0; a number of blocks from 1"),
        ("[tenants.a]\nmax_blocks = -1", "max_blocks is -1"),
        ("[tenants.a]\nmax_blocks = 1.5", "max_blocks is 1.5"),
        ("[tenants.a]\nmax_blocks = true", "max_blocks is True"),
        ('[tenants.a]\nmax_blocks = "9"', "max_blocks is '9'"),
        ("[tenants.a]\nmax_blocks = 4294967296", "to 4294967295 is needed"),
        ("[tenants.a]\nguaranteed_blocks = 2\nmax_blocks = 1", "guaranteed_blocks is above max_blocks"),
        ('[tenants."*"]\nguaranteed_blocks = 2', "needs a tenant's name"),
        ('[tenants."a b"]\nmax_blocks = 2', "no tenant's name"),
        (
            "[tenants]\na = 2",
            "a table with guaranteed_blocks, max_blocks, pin_blocks, max_parked_blocks is needed",
        ),
        ("tenants = 2", r"tables \[tenants.NAME\] are needed"),
        ("[tenant.a]\nmax_blocks = 2", "did you mean tenants?"),
    ],
)
def test_a_mistake_is_refused_with_the_way_out(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        settings(tmp_path, text)


def test_there_are_not_more_tables_than_can_be_summed_up_at_once(tmp_path: Path) -> None:
    tables = "\n".join(f"[tenants.t{number}]" for number in range(MAX_TENANT_TABLES + 1))
    with pytest.raises(InvalidArgumentError, match=f"at most {MAX_TENANT_TABLES}"):
        settings(tmp_path, tables)
