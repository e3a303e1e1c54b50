"""The README's programs run as they are printed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from tests.running_kvd import PATIENCE_S, eventually, running_kvd
from transformers import LlamaConfig, LlamaForCausalLM

import kvd_client

REPOSITORY = Path(__file__).resolve().parents[1]
README, EXAMPLE = REPOSITORY / "README.md", REPOSITORY / "examples" / "worker.py"
WORKER, TRANSFORMERS, SHARING, RESTING = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_worker_runs_and_compresses(tmp_path: Path) -> None:
    with running_kvd(tmp_path, "--host-memory", "1100MiB") as kvd:
        environment = os.environ | {"KVD_ENDPOINT": str(kvd.run_dir)}
        command = [sys.executable, str(EXAMPLE)]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.returncode == 0, said.stderr
    assert "CompressionReport(tokens_before=640, tokens_kept=96" in said.stdout
    tokens = [line for line in said.stdout.splitlines() if line.startswith("token ")]
    assert (len(tokens), tokens[-1]) == (20, "token 659 after 115 slots of 640 tokens")


def test_the_example_is_the_worker_that_the_readme_shows() -> None:
    shown = [ast.dump(node) for node in ast.parse(WORKER).body if not isinstance(node, ast.Import)]
    example = [ast.dump(node) for node in ast.parse(EXAMPLE.read_text()).body]
    assert example[-len(shown) :] == shown


def test_the_sharing_program_prefills_a_prompt_once_and_hands_a_sample_over(tmp_path: Path) -> None:
    prefilled: list[int] = []

    def prefill(lease: kvd_client.Lease, ids: list[int]) -> None:
        lease.write(0, lease.extend(len(ids)), torch.zeros(len(ids), 1, 8), torch.zeros(len(ids), 1, 8))
        lease.commit(len(ids))
        prefilled.append(len(ids))

    with running_kvd(tmp_path) as kvd, kvd_client.connect(kvd.run_dir) as client:
        pool = client.pool("pool", kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8), 64)
        for _ in range(2):
            names: dict[str, Any] = {"pool": pool, "ids": list(range(100)), "prefill": prefill}
            exec(SHARING, names)
            assert names["receiver"].length == 100
            names["receiver"].release()
        assert prefilled == [100, 4]


def test_the_resting_program_gives_way_when_it_is_asked_and_while_it_rests(tmp_path: Path) -> None:
    with running_kvd(tmp_path) as kvd, kvd_client.connect(kvd.run_dir) as client:
        pool = client.pool("pool", kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8), 300)

        def others_want(blocks: int) -> None:
            with pool.lease(tokens=16 * blocks, wait=PATIENCE_S):
                pass

        def prefill(lease: kvd_client.Lease) -> None:
            lease.write(0, lease.extend(4096), torch.rand(4096, 1, 8), torch.rand(4096, 1, 8))
            lease.commit(4096)
            if asked:
                Thread(target=others_want, args=(200,)).start()
                eventually(lambda: lease.compress_wanted == 1024, "the wish")

        for asked in (True, False):
            sleeping = RESTING.replace("lease.rest()", "lease.rest(); others_want(200)")
            names: dict[str, Any] = {"pool": pool, "kvd_client": kvd_client, "prefill": prefill}
            names |= {"q": torch.rand(1, 32, 2, 8), "others_want": others_want}
            exec(sleeping.replace("...", "prefill(lease)"), names)
            lease = names["lease"]
            assert (lease.length, lease.position) == (1024, 4096)
            assert names["given"] == (0 if asked else 3072)
            lease.release()


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
