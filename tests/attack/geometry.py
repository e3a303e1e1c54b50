"""A pool small enough that every test may have one."""

import kvd_client

SPEC = kvd_client.KVSpec(layers=2, kv_heads=2, head_dim=16, dtype="float32", block_size=16)
