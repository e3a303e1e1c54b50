"""The KV geometry as users write it."""

from dataclasses import asdict
from typing import Any

from kvd import spec as shared
from kvd.arguments import shown
from kvd.errors import InvalidArgumentError
from kvd.spec import KV_LAYER_TYPES


class KVSpec(shared.KVSpec):
    """The KV geometry of a pool; equal to a `kvd.spec.KVSpec` of the same fields.

    layers, kv_heads        on this device, under tensor parallelism
    head_dim                elements per key and per value, or head_dim_k and head_dim_v where they differ
    dtype                   "bfloat16", "float16", "float32", "float8_e4m3fn", short "bf16", "fp16", "fp8";
                            or a torch dtype
    block_size              tokens per block
    layout                  "block_outermost": one block is one byte range; or "layer_outermost"
    backend                 who interprets the bytes

    Raises InvalidArgumentError on values outside the limits of `kvd.spec`.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int | None = None, dtype: Any = "bfloat16", **others: Any
    ) -> None:
        fields: dict[str, Any] = {}
        if head_dim is not None:
            fields = {"head_dim_k": head_dim, "head_dim_v": head_dim}
        if fields and fields.keys() & others.keys():
            raise InvalidArgumentError("give head_dim, or head_dim_k and head_dim_v, but not both")
        fields.update(others)
        if missing := {"head_dim_k", "head_dim_v"} - fields.keys():
            raise InvalidArgumentError(
                f"{' and '.join(sorted(missing))} missing; give head_dim, or both of them"
            )
        super().__init__(layers=layers, kv_heads=kv_heads, dtype=dtype_name(dtype), **fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, shared.KVSpec) and asdict(self) == asdict(other)

    __hash__ = shared.KVSpec.__hash__

    @classmethod
    def from_hf(cls, config: Any, dtype: Any = None, **others: Any) -> "KVSpec":
        """The geometry of a transformers config: one whose layers all keep keys and values.

        `dtype` defaults to the config's, `others` are block_size, layout and backend. Raises
        InvalidArgumentError where the config does not say enough.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        without_kv = set(map(str, getattr(config, "layer_types", None) or ())) - set(KV_LAYER_TYPES)
        if without_kv:
            raise InvalidArgumentError(
                f"layers of type {', '.join(sorted(without_kv))} keep no keys and values; "
                f"build KVSpec(layers=...) with the number of those that do"
            )
        heads = _count(config, "num_attention_heads")
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dtype = dtype or getattr(config, "dtype", None) or "bfloat16"
        return cls(
            _count(config, "num_hidden_layers"), kv_heads, dtype=dtype, **_dims(config, heads), **others
        )


def _dims(config: Any, heads: int) -> dict[str, int]:
    """Elements of a key and of a value of one head."""
    if rope_dim := getattr(config, "qk_rope_head_dim", None):  # multi-head latent attention, uncompressed
        nope_dim = _count(config, "qk_nope_head_dim")
        return {"head_dim_k": nope_dim + rope_dim, "head_dim_v": _count(config, "v_head_dim")}
    head_dim = getattr(config, "head_dim", None) or _count(config, "hidden_size") // heads
    return {"head_dim_k": head_dim, "head_dim_v": head_dim}


def _count(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(
            f"the config, a {type(config).__name__}, has {name}={shown(value)}; pass a transformers config "
            f"of a decoder, or build KVSpec(layers=...) by hand"
        )
    return value


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" of "bfloat16", of torch.bfloat16 and of numpy's float types; torch need not be there."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "__name__", None)
    if name is None and type(dtype).__module__.partition(".")[0] in ("torch", "numpy"):
        name = str(dtype).removeprefix("torch.")
    return name if isinstance(name, str) else shown(dtype)
