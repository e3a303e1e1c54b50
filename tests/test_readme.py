"""The README's programs run as they are printed."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.running_kvd import running_kvd
from transformers import LlamaConfig, LlamaForCausalLM

import kvd_client

README = Path(__file__).resolve().parents[1] / "README.md"
WORKER, TRANSFORMERS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


class RandomModel:
    """What the worker example needs of a model: 32 layers, 32 query heads, 8 KV heads of 128."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.last_queries = torch.randn(32, 32, 32, 128).bfloat16()

    def prefill(self, prompt: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(len(prompt), 8, 128).bfloat16(), torch.randn(len(prompt), 8, 128).bfloat16())
        ] * 32

    def decode(self, pool: object, table: object, length: int, position: int, slot: object) -> None:
        self.names["seen"] = SimpleNamespace(length=length, position=position)
        self.names["done"] = True


def test_the_worker_runs_and_compresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_kvd(tmp_path, "--host-memory", "1100MiB") as kvd:
        monkeypatch.setenv("KVD_RUN_DIR", str(kvd.run_dir))
        names: dict[str, Any] = {"prompt": list(range(640)), "done": False}
        names["model"] = RandomModel(names)
        exec(WORKER, names)
        names["client"].close()
    assert "CompressionReport(tokens_before=640, tokens_kept=96" in capsys.readouterr().out
    assert (names["seen"].length, names["seen"].position) == (96, 640)


def test_the_transformers_program_generates_from_a_compressed_lease(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        dtype="float32",
    )
    with running_kvd(tmp_path) as kvd, kvd_client.connect(kvd.run_dir) as client:
        model = LlamaForCausalLM(config).eval()
        names: dict[str, Any] = {"torch": torch, "kvd_client": kvd_client, "client": client, "model": model}
        names["ids"] = torch.randint(0, 64, (1, 400))
        exec(TRANSFORMERS, names)
        [report] = names["cache"].reports
        assert (report.tokens_before, report.tokens_kept) == (400, 64)
