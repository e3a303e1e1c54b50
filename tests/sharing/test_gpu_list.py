"""What an operator may write for --gpus and --memory."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidArgumentError
from kvd_daemon.gpu_list import chosen_gpus, gpus_text, names_these, resolved, share_of
from kvd_daemon.settings import Settings, settings_from
from kvd_daemon.settings_page import page

THERE = [f"GPU-{digit * 8}-0000-0000-0000-00000000000{digit}" for digit in "0123"]
MIG = "MIG-44444444-0000-0000-0000-000000000004"


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("0-3", ["gpu0", "gpu1", "gpu2", "gpu3"]),
        ("0,2-3", ["gpu0", "gpu2", "gpu3"]),
        (" 3 , 1", ["gpu3", "gpu1"]),
        ([1, "2-3"], ["gpu1", "gpu2", "gpu3"]),
        (2, ["gpu2"]),
        ("all", ["gpu0", "gpu1", "gpu2", "gpu3", "gpu4"]),
        (THERE[2], ["gpu2"]),
        ("gpu-2222", ["gpu2"]),
        (MIG, ["gpu4"]),
        (f"7={THERE[0]}", ["gpu7"]),
    ],
)
def test_gpus_are_chosen_by_index_range_and_uuid(written: object, devices: list[str]) -> None:
    text = gpus_text(written)
    running = resolved(text, [*THERE, MIG])
    assert [gpu.device for gpu in chosen_gpus(running)] == devices
    assert names_these(text, running)
    assert not names_these("0-2,4", running)
    assert not names_these(text, "")
    assert not names_these("", running)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("4-2", "ends before it begins"),
        ("0-", "is no GPU"),
        ("-1", "is no GPU"),
        ("GPU-", "is no GPU"),
        ("0,0", "is named twice"),
        (f"0,{THERE[0]}", "is named twice"),
        (f"1={THERE[0]},1", "is named twice"),
        ("9", "there is no GPU 9 here"),
        ("GPU-99999", "is none of"),
        (True, "UUIDs"),
        (1.5, "UUIDs"),
        ([["0"]], "UUIDs"),
    ],
)
def test_what_names_no_gpu_or_one_twice_is_refused(written: object, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        resolved(gpus_text(written), THERE)


@given(st.text("0123456789-,= GPUMIGabcdefl", max_size=30))
def test_any_text_is_a_choice_or_an_invalid_argument(text: str) -> None:
    try:
        chosen = chosen_gpus(resolved(gpus_text(text), THERE))
    except InvalidArgumentError:
        return
    assert {gpu.uuid for gpu in chosen} <= set(THERE)


def test_the_page_of_settings_can_be_read_again() -> None:
    for written in ({"gpus": "0-1", "memory": "60GiB"}, {"host_memory": "1GiB"}):
        settings = Settings(**settings_from(written))  # type: ignore[arg-type]
        assert Settings(**settings_from(tomllib.loads(page(settings)))) == settings  # type: ignore[arg-type]


def test_a_resolved_choice_travels_between_processes_and_means_the_same_gpus() -> None:
    chosen = settings_from({"gpus": "1-2", "memory": 0.5})
    settings = Settings(**chosen | {"gpus": resolved("1-2", THERE)})  # type: ignore[arg-type]
    assert Settings.from_json(settings.to_json()) == settings
    assert settings.device_names == ("gpu1", "gpu2")
    assert settings.gpu_uuid("gpu2") == THERE[2]


@pytest.mark.parametrize(
    ("text", "share"), [("0.85", 0.85), (".5", 0.5), ("1", 1.0), ("1.0", 1.0), ("2", None), ("60GiB", None)]
)
def test_a_share_is_told_from_a_size(text: str, share: float | None) -> None:
    assert share_of(text) == share


@pytest.mark.parametrize("memory", ["0", "much", "85%"])
def test_memory_that_is_neither_is_refused(memory: str) -> None:
    with pytest.raises(InvalidArgumentError):
        Settings(gpus=f"0={THERE[0]}", memory=memory)
