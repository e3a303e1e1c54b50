"""A worker whose text never ends: the stream under the leases it is told, a chunk each in turn."""

import sys

import torch

import kvd_client
from kvd_client import Dense, KVSpec, Policy, Streaming
from kvd_client.hf import KvdCache, attach
from kvd_demo.demo.pool import BLOCK_SIZE, CALL_TIMEOUT_S, POOL, STREAM_TOKENS, WINDOW_TOKENS, tell
from kvd_demo.prose import prose
from kvd_demo.smollm2 import load_model, load_tokenizer

CHUNK_TOKENS = 128
POLICIES: dict[str, Policy] = {
    "dense": Dense(),
    "streaming": Streaming(sinks=4, window=WINDOW_TOKENS),
    "window": Streaming(sinks=0, window=WINDOW_TOKENS + 4),
}


class Stream:
    """One lease's view of the text, and how well the model foretells it from there."""

    def __init__(self, name: str, lease: kvd_client.Lease) -> None:
        self.name, self.cache = name, KvdCache(lease)
        self._last_logits: torch.Tensor | None = None

    def read(self, model: torch.nn.Module, chunk: torch.Tensor) -> None:
        """Feed [1, tokens] and tell their mean negative log-likelihood, each given what is in view."""
        first = self.cache.lease.position
        logits = model(chunk, past_key_values=self.cache).logits[0].float()
        known = logits[:0] if self._last_logits is None else self._last_logits
        foretold = torch.cat((known, logits[:-1]))
        nll = torch.nn.functional.cross_entropy(foretold, chunk[0, -foretold.shape[0] :]).item()
        self._last_logits = logits[-1:]
        lease = self.cache.lease
        tell(
            "chunk",
            name=self.name,
            first=first,
            tokens=foretold.shape[0],
            nll=nll,
            position=lease.position,
            blocks=int(lease.block_table.size),
        )


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = load_model(torch.float32)
    attach(model)
    ids = torch.tensor([load_tokenizer().encode(prose())[:STREAM_TOKENS]])
    with kvd_client.connect(name="streamer", timeout=CALL_TIMEOUT_S) as client:
        pool = client.pool(POOL, KVSpec.from_hf(model.config, dtype="float32", block_size=BLOCK_SIZE))
        streams = [
            Stream(name, pool.lease(policy=policy))
            for name, policy in POLICIES.items()
            if name in sys.argv[1:]
        ]
        for chunk in torch.split(ids, CHUNK_TOKENS, dim=1):
            for stream in streams:
                stream.read(model, chunk)


if __name__ == "__main__":
    main()
