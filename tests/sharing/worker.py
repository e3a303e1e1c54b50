"""A worker process for tests: one JSON line in, one out. `Worker` in workers.py is its other end."""

import ctypes
import dataclasses
import hashlib
import json
import sys
from typing import Any

import numpy as np

import kvd_client
from kvd_client._host_memory import HostPoolMemory

PATIENCE_S = 60.0  # for a daemon that is being replaced on a machine with other work
SPEC = kvd_client.KVSpec(layers=2, kv_heads=2, head_dim_k=8, head_dim_v=16, dtype="float32", block_size=16)
H2O = kvd_client.H2O(sinks=4, recent=8, keep=0.5)


class Desk:
    """What a test may ask for. Every element of token t of a lease that began with `value` is value + t."""

    def __init__(self, run_dir: str, device: str) -> None:
        self.client = kvd_client.connect(run_dir, device=device, timeout=PATIENCE_S)
        self.pools: dict[str, kvd_client.Pool] = {}
        self.leases: dict[str, kvd_client.Lease] = {}
        self.held: list[Any] = []

    def pool(self, name: str, blocks: int = 0, read_only: bool = False, layout: str = SPEC.layout) -> str:
        spec = dataclasses.replace(SPEC, layout=layout) if blocks else None
        self.pools[name] = self.client.pool(name, spec, blocks, read_only)
        return self.pools[name].pool_id

    def fill(self, pool: str, lease: str, tokens: int, value: float, stream: int | None = None) -> list[int]:
        """Its block ids."""
        held = self.leases[lease] = self.leases.get(lease) or self.pools[pool].lease()
        slots, begin = held.extend(tokens), value + held.length
        numbers = np.arange(begin, begin + tokens, dtype=np.float32)[:, None, None]
        for layer in range(SPEC.layers):
            k, v = (np.broadcast_to(numbers, (tokens, 2, dim)) for dim in (8, 16))
            held.write(layer, slots, k + 1000 * layer, -v)
        held.commit(tokens, stream=stream)
        return held.block_table.tolist()

    def numbers(self, lease: str) -> list[float]:
        """Of each token, which all its elements agree on."""
        held, found = self.leases[lease], []
        for layer in range(SPEC.layers):
            k, v = held.gather(layer, "numpy")
            assert (k == k[:, :1, :1]).all(), "a key of more than one token"
            assert (v == v[:, :1, :1]).all(), "a value of more than one token"
            np.testing.assert_array_equal(k[:, 0, 0] - 1000 * layer, -v[:, 0, 0])
            found.append((k[:, 0, 0] - 1000 * layer).tolist())
        assert found[0] == found[1], "layers of different tokens"
        return found[0]

    def content(self, lease: str) -> list[str]:
        """Digests of all it holds: positions, keys and values."""
        held = self.leases[lease]
        rows = [part for layer in range(SPEC.layers) for part in held.gather(layer, "numpy")]
        return [hashlib.sha256(part.tobytes()).hexdigest() for part in (held.kept_positions(), *rows)]

    def peek(self, pool: str, block_ids: list[int]) -> list[float]:
        """The first key of each slot of anybody's blocks."""
        slots = (np.array(block_ids)[:, None] * 16 + np.arange(16)).reshape(-1)
        return self.pools[pool].gather(0, slots, "numpy")[0][:, 0, 0].tolist()

    def readable(self, lease: str) -> dict[str, Any]:
        told = dataclasses.asdict(self.leases[lease].readable())
        return told | {"slots": told["slots"].tolist()}

    def read(self, pool: str, told: dict[str, Any]) -> list[float]:
        """The first key of each slot of another worker's lease."""
        lease = kvd_client.Readable(**told | {"slots": np.array(told["slots"])})
        return self.pools[pool].gather(0, lease, "numpy")[0][:, 0, 0].tolist()

    def publish(self, lease: str, key: str) -> None:
        self.leases.pop(lease).publish(key)

    def adopt(self, pool: str, key: str) -> None:
        self.leases[key] = self.pools[pool].adopt(key)

    def lease(self, pool: str) -> None:
        self.pools[pool].lease(tokens=16)

    def write(self, pool: str) -> None:
        self.pools[pool].write(0, [0], np.ones((1, 2, 8), np.float32), np.ones((1, 2, 16), np.float32))

    def extend(self, lease: str) -> None:
        self.leases[lease].extend(1)

    def commit(self, lease: str) -> None:
        self.leases[lease].commit(0)

    def scribble(self, pool: str) -> None:
        """Past all that is said of the memory: what do the kernel and the driver say?"""
        memory = self.pools[pool]._memory
        if isinstance(memory, HostPoolMemory):
            ctypes.memset(memory.bytes.ctypes.data, 1, 1)
        else:
            memory._put(0, np.ones(1, np.uint8))

    def torch_view(self, pool: str, write: bool = False) -> float:
        """Of the first lease's block."""
        k, _ = self.pools[pool].layer(0, "torch")
        if write:
            k[1] = 0
        return float(k[1, 0, 0, 0])

    def compress(self, lease: str, method: str, park: bool = False) -> tuple[int, list[int]]:
        """Tokens kept, and the first head's positions."""
        held = self.leases[lease]
        queries = np.ones((SPEC.layers, 8, 4, 8), np.float32) / 1e4
        if method == "streaming":
            held.compress(kvd_client.Streaming(sinks=4, window=28), park=park)
        elif method == "expected":
            held.compress(kvd_client.ExpectedAttention(recent=8, keep=0.25), queries=queries)
        elif method == "h2o":
            held.compress(H2O, queries=queries)
        elif method == "h2o by what was observed":
            held.compress(H2O)
        else:
            held.compress(kvd_client.SnapKV(window=8, keep=0.25), queries=queries, park=park)
        return held.length, held.kept_positions()[0, 0].tolist()

    def observe(self, lease: str) -> None:
        self.leases[lease].observe(np.ones((SPEC.layers, 40, 4, 8), np.float32))

    def suspend(self, lease: str) -> None:
        self.leases[lease].suspend()

    def resume(self, lease: str) -> None:
        self.leases[lease].resume()

    def restore(self, lease: str) -> int:
        return self.leases[lease].restore()

    def fork(self, lease: str, child: str) -> None:
        [self.leases[child]] = self.leases[lease].fork()

    def prompt(self, pool: str, lease: str, tokens: int) -> int:
        """A lease for the numbers from 0; how many of them are there already."""
        made = self.leases[lease] = self.pools[pool].lease(prompt=range(tokens))
        return made.prefix_tokens

    def seal(self, lease: str) -> None:
        self.leases[lease].seal_prompt()

    def hold_view(self, pool: str) -> dict[str, Any]:
        """A view by a framework: cupy's stand-in, where there is a GPU."""
        k, _ = self.pools[pool].layer(1, "cupy")
        self.held.append(k)
        return {"shape": k.shape, "strides": k.strides, "dtype": k.dtype, "device": k.device}

    def look_at_held(self) -> float:
        return float(self.held[-1].first)

    def framework(self, pool: str, name: str) -> None:
        self.pools[pool].layer(0, name)

    def close(self, pool: str) -> None:
        self.pools.pop(pool).close()

    def release(self, lease: str) -> None:
        self.leases.pop(lease).release()


def main() -> None:
    desk: Desk | None = None
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            if desk is None:
                desk = Desk(*sys.argv[1:])
            answer = {"result": getattr(desk, method)(**arguments)}
        except kvd_client.KvdError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
