"""The KV geometry of a model, from its config.json or by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvd.errors import InvalidArgumentError
from kvd.spec import DTYPE_BYTES, KV_LAYER_TYPES

MAX_CONFIG_BYTES = 4 << 20  # the largest published config.json is far below; guards against weights

DEFAULT_DTYPE = "bfloat16"
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
QUERY_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class ModelGeometry:
    """What of a model decides its KV cache. `notes` say what was assumed, for people.

    dtype  that of the model's weights, in which its workers keep keys and values unless told otherwise
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    notes: tuple[str, ...] = ()
    dtype: str = DEFAULT_DTYPE


def _gqa(name: str, layers: int, query_heads: int, kv_heads: int, head_dim: int) -> ModelGeometry:
    return ModelGeometry(name, layers, query_heads, kv_heads, head_dim, head_dim)


BUILT_IN = {
    model.name: model
    for model in (
        _gqa("llama-3-405b", 126, 128, 8, 128),
        _gqa("llama-3-70b", 80, 64, 8, 128),
        _gqa("llama-3-8b", 32, 32, 8, 128),
        _gqa("llama-3.2-1b", 16, 32, 8, 64),
        _gqa("mistral-7b", 32, 32, 8, 128),
        _gqa("qwen2.5-7b", 28, 28, 4, 128),
        _gqa("qwen3-32b", 64, 64, 8, 128),
        _gqa("qwen3-8b", 36, 32, 8, 128),
        _gqa("smollm2-135m", 30, 9, 3, 64),
    )
}
"""From the models' published config.json files."""


def load_model(text: str) -> ModelGeometry:
    """A built-in name, a config.json, or a folder that holds one. Raises InvalidArgumentError."""
    if text.lower() in BUILT_IN:
        return BUILT_IN[text.lower()]
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidArgumentError(f"{path} is too large to be a config.json; give the file itself")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidArgumentError(
            f"{text!r} is no file and no built-in model; give a config.json or one of {', '.join(BUILT_IN)}"
        ) from None
    except ValueError:  # also UnicodeDecodeError
        raise InvalidArgumentError(f"{path} is not JSON; a Hugging Face config.json is needed") from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{path} holds no JSON object; a Hugging Face config.json is needed")
    return geometry_of(config, str(path))


def geometry_of(config: Mapping[str, Any], name: str) -> ModelGeometry:
    """The geometry a Hugging Face config states. Raises InvalidArgumentError naming what is missing."""
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    _refuse_latents(config, name)
    layers = _find(config, LAYER_KEYS, name)
    query_heads = _find(config, QUERY_HEAD_KEYS, name)
    kv_heads, notes = _kv_heads(config, query_heads)
    head_dim = _head_dim(config, query_heads, name)
    geometry = ModelGeometry(
        name=name,
        layers=layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim_k=head_dim,
        head_dim_v=_maybe(config, ("v_head_dim",)) or head_dim,
        notes=notes,
        dtype=_dtype(config),
    )
    return _count_layer_types(config, geometry)


def _dtype(config: Mapping[str, Any]) -> str:
    """What KVSpec.from_hf would take; the default where a pool cannot have that type, or none is named."""
    named = config.get("dtype") or config.get("torch_dtype")
    name = named.removeprefix("torch.") if isinstance(named, str) else ""
    return name if name in DTYPE_BYTES else DEFAULT_DTYPE


def _maybe(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _find(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    value = _maybe(config, keys)
    if value is None:
        raise InvalidArgumentError(
            f"{name} has no {keys[0]}; add it to the file, or give the geometry with --layers, --kv-heads "
            f"and --head-dim",
            field=keys[0],
        )
    return value


def _kv_heads(config: Mapping[str, Any], query_heads: int) -> tuple[int, tuple[str, ...]]:
    kv_heads = _maybe(config, KV_HEAD_KEYS)
    if kv_heads is not None:
        return kv_heads, ()
    if config.get("multi_query") is True:
        return 1, ()
    return query_heads, (f"the config names no {KV_HEAD_KEYS[0]}: one KV head per query head was assumed",)


def _head_dim(config: Mapping[str, Any], query_heads: int, name: str) -> int:
    head_dim = _maybe(config, ("head_dim",))
    if head_dim is not None:
        return head_dim
    hidden = _maybe(config, HIDDEN_KEYS)
    if hidden is None:
        raise InvalidArgumentError(
            f"{name} has neither head_dim nor {HIDDEN_KEYS[0]}; add one of them to the file", field="head_dim"
        )
    if hidden % query_heads:
        raise InvalidArgumentError(
            f"{name}: {HIDDEN_KEYS[0]} {hidden} is no multiple of {query_heads} heads; add head_dim to it",
            field="head_dim",
        )
    return hidden // query_heads


def _refuse_latents(config: Mapping[str, Any], name: str) -> None:
    rank = _maybe(config, ("kv_lora_rank",))
    if rank is None:
        return
    rope = _maybe(config, ("qk_rope_head_dim",)) or 0
    raise InvalidArgumentError(
        f"{name} uses latent attention (MLA): it caches one latent of {rank} + {rope} elements per token and "
        f"layer instead of K and V per head, which kvd's pools do not hold; plan for a model with KV heads"
    )


def _count_layer_types(config: Mapping[str, Any], geometry: ModelGeometry) -> ModelGeometry:
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != geometry.layers:
        return geometry
    holding = sum(kind in KV_LAYER_TYPES for kind in types)
    sliding = sum(kind in KV_LAYER_TYPES[1:] for kind in types)
    if not holding:
        raise InvalidArgumentError(f"{geometry.name}: no layer attends (layer_types), so it has no KV cache")
    notes = geometry.notes
    if holding < geometry.layers:
        notes += (f"{geometry.layers - holding} of {geometry.layers} layers have no KV cache",)
    if sliding:
        notes += (f"{sliding} layers attend to a window only; kvd holds every token of them all the same",)
    return replace(geometry, layers=holding, notes=notes)
