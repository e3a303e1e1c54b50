"""The KV geometry of a pool: where each layer's keys and values lie.

Axes: L layer, B block, H kv head, N token in block. Two layouts:

block_outermost  [B, L, (K: N, H, Dk | V: N, H, Dv)]   one block is one byte range
layer_outermost  [L, (K: B, N, H, Dk | V: B, N, H, Dv)]
"""

import hashlib
from dataclasses import asdict, dataclass

from kvd.arguments import one_of, text, whole

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
DTYPE_ALIASES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16"}
QUERY_DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("block_outermost", "layer_outermost")
KV_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Those of a Hugging Face config's `layer_types` that keep keys and values."""

MAX_LAYERS = 1024  # no model comes near; bounds the geometry's arithmetic
MAX_KV_HEADS = 1024  # likewise
MAX_HEAD_DIM = 2048  # MLA latents are 576
MAX_BLOCK_SIZE = 1024  # tokens; engines use 8 to 128
MAX_BACKEND_CHARS = 64  # a tag, not a text
SIDECAR_BYTES_PER_SLOT = 8  # int32 position + float32 running score, per layer and kv head


@dataclass(frozen=True)
class Plane:
    """Where one layer's K (or V) lies: a strided view [blocks, block_size, kv_heads, head_dim].

    `offset_bytes` of block 0 in the pool, `block_stride_bytes` between blocks; inside a block the
    last three axes are contiguous.
    """

    offset_bytes: int
    block_stride_bytes: int
    head_dim: int


@dataclass(frozen=True)
class KVSpec:
    """The KV geometry of a pool. Raises InvalidArgumentError on values outside the limits."""

    layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str = "bfloat16"
    block_size: int = 16
    layout: str = "block_outermost"
    backend: str = "generic"

    def __post_init__(self) -> None:
        dtype = DTYPE_ALIASES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        object.__setattr__(self, "dtype", one_of("dtype", dtype, DTYPE_BYTES))
        one_of("layout", self.layout, LAYOUTS)
        text("backend", self.backend, MAX_BACKEND_CHARS)
        for name, limit in _LIMITS.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, limit))

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return self.layers * self.kv_heads * (self.head_dim_k + self.head_dim_v) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def blocks_for(self, token_count: int) -> int:
        """Blocks that hold `token_count` tokens."""
        return -(-token_count // self.block_size)

    def pool_bytes(self, block_count: int) -> int:
        """Bytes of a pool of `block_count` blocks, the null block included."""
        return self.block_bytes * block_count

    def sidecar_bytes(self, block_count: int) -> int:
        """Bytes of the sidecar: positions int32, then running scores float32, each
        [blocks, layers, kv_heads, block_size]. Pages never written cost nothing."""
        return block_count * self.layers * self.kv_heads * self.block_size * SIDECAR_BYTES_PER_SLOT

    def planes(self, layer: int, block_count: int) -> tuple[Plane, Plane]:
        """K and V of one layer in a pool of `block_count` blocks."""
        row = self.block_size * self.kv_heads * self.element_bytes
        k_bytes, v_bytes = row * self.head_dim_k, row * self.head_dim_v
        if self.layout == "block_outermost":
            k_at = layer * (k_bytes + v_bytes)
            strides, v_at = (self.block_bytes, self.block_bytes), k_at + k_bytes
        else:
            k_at = layer * (k_bytes + v_bytes) * block_count
            strides, v_at = (k_bytes, v_bytes), k_at + k_bytes * block_count
        return Plane(k_at, strides[0], self.head_dim_k), Plane(v_at, strides[1], self.head_dim_v)

    def block_segments(self, block_id: int, block_count: int) -> list[tuple[int, int]]:
        """(offset, bytes) of a block's bytes in the pool, in order; one segment if block-outermost."""
        if self.layout == "block_outermost":
            return [(block_id * self.block_bytes, self.block_bytes)]
        row = self.block_size * self.kv_heads * self.element_bytes
        return [
            (plane.offset_bytes + block_id * plane.block_stride_bytes, row * plane.head_dim)
            for layer in range(self.layers)
            for plane in self.planes(layer, block_count)
        ]

    def fingerprint(self) -> str:
        """Equal for equal geometries, in every process: hex SHA-256 of the fields."""
        text = ";".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def differing_fields(self, other: "KVSpec") -> dict[str, tuple[object, object]]:
        """Field name -> (mine, theirs) for every field that differs."""
        mine, theirs = asdict(self), asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


_LIMITS = {
    "layers": MAX_LAYERS,
    "kv_heads": MAX_KV_HEADS,
    "head_dim_k": MAX_HEAD_DIM,
    "head_dim_v": MAX_HEAD_DIM,
    "block_size": MAX_BLOCK_SIZE,
}
