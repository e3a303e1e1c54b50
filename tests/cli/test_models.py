"""Reading a model's KV geometry from what it publishes."""

import json
from pathlib import Path

import pytest

from kvd.errors import InvalidArgumentError
from kvd_client.cli.models import BUILT_IN, geometry_of, load_model

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def heads(config: dict[str, object]) -> tuple[int, int, int, int]:
    model = geometry_of(config, "config.json")
    return model.layers, model.kv_heads, model.head_dim_k, model.head_dim_v


def test_the_head_dim_is_the_hidden_size_over_the_heads_unless_it_is_named() -> None:
    assert heads(LLAMA) == (32, 8, 128, 128)
    assert heads(LLAMA | {"head_dim": 64}) == (32, 8, 64, 64)


def test_values_may_have_a_width_of_their_own() -> None:
    assert heads(LLAMA | {"head_dim": 192, "v_head_dim": 128}) == (32, 8, 192, 128)


def test_a_multimodal_config_is_read_through_its_text_config() -> None:
    assert heads({"vision_config": {"num_hidden_layers": 27}, "text_config": LLAMA}) == (32, 8, 128, 128)


def test_gpt2_style_names_are_understood_and_the_assumption_is_said() -> None:
    model = geometry_of({"n_layer": 12, "n_head": 12, "n_embd": 768}, "config.json")
    assert (model.layers, model.kv_heads, model.head_dim_k) == (12, 12, 64)
    assert "one KV head per query head was assumed" in model.notes[0]


def test_multi_query_models_have_one_kv_head() -> None:
    assert geometry_of({"n_layer": 2, "n_head": 71, "n_embd": 4544, "multi_query": True}, "x").kv_heads == 1


def test_layers_without_attention_are_not_counted() -> None:
    types = ["linear_attention"] * 24 + ["full_attention"] * 8
    model = geometry_of(LLAMA | {"layer_types": types}, "config.json")
    assert model.layers == 8
    assert model.notes == ("24 of 32 layers have no KV cache",)


def test_window_layers_are_counted_whole_and_said() -> None:
    model = geometry_of(LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 16}, "config.json")
    assert model.layers == 32
    assert model.notes[0].startswith("16 layers attend to a window only")


def test_latent_attention_is_refused_with_its_reason() -> None:
    with pytest.raises(InvalidArgumentError, match=r"latent attention \(MLA\).*512 \+ 64"):
        geometry_of(LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "config.json")


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(InvalidArgumentError, match=field):
        geometry_of(config, "config.json")


def test_a_hidden_size_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no multiple of 32 heads"):
        geometry_of(LLAMA | {"hidden_size": 4097}, "config.json")


def test_a_model_is_a_name_a_file_or_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert load_model("Llama-3-70B") is BUILT_IN["llama-3-70b"]
    assert load_model(str(file)) == load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no built-in model"),
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "no JSON object"),
    ],
)
def test_what_is_no_config_is_refused_with_what_is_needed(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=complaint):
        load_model(str(file))


def test_a_file_of_weights_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(InvalidArgumentError, match="too large"):
        load_model(str(tmp_path / "model.safetensors"))
