"""The README's worker, with random tensors in a model's place.

kvd --host-memory 2GiB &
python examples/worker.py
"""

import torch

import kvd_client

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

prompt = list(range(640))  # token ids
done = False


class RandomModel:
    """32 layers, 32 query heads, 8 KV heads of 128; it has said enough after 20 tokens."""

    last_queries = torch.randn(32, 32, 32, 128).bfloat16()  # [layers, window, query_heads, head_dim]

    def prefill(self, token_ids: list[int]) -> Pairs:
        """Per layer K and V, each [tokens, kv_heads, head_dim]."""
        shape = (len(token_ids), 8, 128)
        return [(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16())] * 32

    def decode(self, pool: kvd_client.Pool, table: object, length: int, position: int, slot: object) -> None:
        """A real one would attend to `length` slots through `table`, and write its K and V to `slot`."""
        print(f"token {position} after {length} slots of {len(prompt)} tokens")
        global done
        done = position == len(prompt) + 19


model = RandomModel()

# From here on it is what the README shows.
client = kvd_client.connect()  # to a `kvd --host-memory 2GiB` on this machine
spec = kvd_client.KVSpec(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
pool = client.pool("llama3-8b", spec, blocks=512)  # create or attach: 1 GiB

with pool.lease(tokens=len(prompt), policy=kvd_client.Dual(sinks=4, window=32, keep=0.15)) as lease:
    slots = torch.from_numpy(lease.extend(len(prompt)))  # where the tokens go
    for layer, (k, v) in enumerate(model.prefill(prompt)):  # each [tokens, kv_heads, head_dim]
        k_pool, v_pool = pool.layer(layer)  # [blocks, block_size, kv_heads, head_dim], no copy
        k_pool[slots // 16, slots % 16] = k  # or pool.write(layer, slots, k, v): converts dtypes
        v_pool[slots // 16, slots % 16] = v
    lease.commit(len(prompt))
    print(lease.compress(queries=model.last_queries))  # [layers, window, q_heads, head_dim]
    while not done:
        slot = lease.extend(1)  # asks the daemon only when a block is missing
        model.decode(pool, lease.block_table, lease.length, lease.position, slot)
        lease.commit(1)
