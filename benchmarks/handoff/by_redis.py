"""SET and GET on a redis-server of this machine, by its Unix socket, which is `place`."""

from pathlib import Path

import numpy as np
import redis
from role import PAGE_BYTES, Bytes, Chunks


class Way:
    def __init__(self, place: Path, byte_count: int, is_giver: bool) -> None:
        self._redis = redis.Redis(unix_socket_path=str(place))
        self._own = np.zeros(byte_count, np.uint8)

    def prepare(self) -> Bytes:
        self._own[::PAGE_BYTES] = 1
        return self._own

    def give(self, chunks: Chunks) -> None:
        for part in chunks:
            self._redis.set(f"sequence:{part.start}", memoryview(self._own[part]))
            chunks.say()

    def take(self, chunks: Chunks) -> Bytes:
        for part in chunks:
            chunks.hear()
            content = self._redis.get(f"sequence:{part.start}")
            self._own[part] = np.frombuffer(content, np.uint8)
        return self._own
