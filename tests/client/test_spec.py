"""The geometry as users write it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvd.spec
from kvd_client import InvalidArgumentError, KVSpec


def test_one_head_dim_is_that_of_keys_and_values() -> None:
    spec = KVSpec(layers=32, kv_heads=8, head_dim=128)
    assert (spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.block_size) == (128, 128, "bfloat16", 16)


def test_it_is_a_spec_of_the_shared_vocabulary_and_equal_to_one() -> None:
    mine, shared = KVSpec(2, 4, head_dim_k=8, head_dim_v=6), kvd.spec.KVSpec(2, 4, 8, 6)
    assert isinstance(mine, kvd.spec.KVSpec)
    assert mine == shared
    assert shared == mine
    assert hash(mine) == hash(shared)
    assert mine != KVSpec(2, 4, 8)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float16, "float16"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
    ],
)
def test_a_dtype_may_be_a_name_an_alias_or_a_torch_or_numpy_type(dtype, name) -> None:
    assert KVSpec(1, 1, 8, dtype).dtype == name


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "head_dim"),
        ({"head_dim_k": 8}, "head_dim_v"),
        ({"head_dim": 8, "head_dim_k": 8}, "not both"),
        ({"head_dim": 8, "dtype": "int4"}, "int4"),
        ({"head_dim": 8, "layout": "diagonal"}, "diagonal"),
        ({"head_dim": 0}, "head_dim_k"),
    ],
)
def test_what_is_wrong_is_named(fields, text) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        KVSpec(layers=1, kv_heads=1, **fields)


def _config(**more: object) -> SimpleNamespace:
    fields = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576, "dtype": torch.bfloat16}
    return SimpleNamespace(**(fields | more))


def test_a_transformers_config_says_it_all() -> None:
    assert KVSpec.from_hf(_config(num_key_value_heads=3)) == KVSpec(30, 3, 64)
    assert KVSpec.from_hf(_config(), dtype="float32", block_size=32) == KVSpec(
        30, 9, 64, "float32", block_size=32
    )
    assert KVSpec.from_hf(_config(head_dim=128)).head_dim_v == 128


def test_a_real_config_of_grouped_heads() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, hidden_size=256)
    assert KVSpec.from_hf(config, dtype="bf16") == KVSpec(4, 2, 32)


def test_multi_head_latent_attention_has_two_head_dims() -> None:
    latent = _config(qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64)
    assert (KVSpec.from_hf(latent).head_dim_k, KVSpec.from_hf(latent).head_dim_v) == (192, 128)


def test_layers_without_keys_and_values_are_not_guessed_at() -> None:
    with pytest.raises(InvalidArgumentError, match="linear_attention"):
        KVSpec.from_hf(_config(layer_types=["linear_attention", "full_attention"]))
