"""Each command against a real kvd of two devices."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.cli.conftest import BLOCKS, SPEC, Kvctl, Worker
from transformers import LlamaConfig

import kvd_client

PROMISED_POOL_FIELDS = {
    "name",
    "device",
    "block_bytes",
    "block_size",
    "blocks_total",
    "blocks_free",
    "blocks_leased",
    "blocks_sealed",
    "blocks_cached",
    "blocks_quarantined",
    "sink_blocks_locked",
    "leases",
    "compressions",
    "blocks_saved",
    "tokens_dropped",
}


def test_pool_status_counts_what_the_worker_holds(kvctl: Kvctl, worker: Worker) -> None:
    answer = kvctl("pool", "status", "-o", "json")
    assert answer.status == 0
    assert [device["device"] for device in answer.document["devices"]] == ["host0", "host1"]
    (pool,) = answer.document["pools"]
    assert pool.keys() >= PROMISED_POOL_FIELDS
    held = 7 + len(worker.streaming.block_table)
    assert (pool["leases"], pool["blocks_leased"]) == (2, held)
    assert (pool["blocks_total"], pool["blocks_free"]) == (BLOCKS + 1, BLOCKS - held)
    assert pool["block_bytes"] == SPEC.block_bytes


def test_pool_status_for_people_says_the_same(kvctl: Kvctl, worker: Worker) -> None:
    text = kvctl("pool", "status", "chat").out
    assert text.startswith("host0  serving  ")
    assert "host1" not in text
    assert (
        f"chat  2 layers x 2 KV heads x 8 float32, 16-token blocks of {SPEC.block_bytes // 1024} KiB" in text
    )
    assert f"{7 + len(worker.streaming.block_table)} " in text
    assert "\x1b" not in text


def test_a_compression_shows_in_the_page_and_at_the_lease(kvctl: Kvctl, worker: Worker) -> None:
    queries = np.random.default_rng(0).standard_normal((2, 16, 4, 8)).astype(np.float32)
    policy = kvd_client.SnapKV(window=16, keep=0.4)
    freed = 7 - worker.dense.compress(queries=queries, policy=policy).blocks_after
    pool = kvctl("status", "-o", "json").document["pools"][0]
    assert (pool["compressions"], pool["blocks_saved"]) == (1, freed)
    assert pool["saved_bytes"] == freed * SPEC.block_bytes
    assert f"in 1 compression ({freed} blocks" in kvctl("status").out
    assert kvctl("lease", "show", worker.dense.lease_id, "-o", "json").document["blocks_saved"] == freed


def test_the_page_tells_what_matches_find(kvctl: Kvctl, worker: Worker) -> None:
    assert "asked for" not in kvctl("status").out
    hashes = [bytes([number]) * 32 for number in range(4)]
    worker.dense.seal(hashes[:3])
    with worker.dense.pool.match(hashes) as found, worker.dense.pool.match(hashes[3:]) as missed:
        assert (len(found), len(missed)) == (3, 0)
    (pool,) = kvctl("status", "-o", "json").document["pools"]
    assert (pool["match_blocks_found"], pool["match_blocks_asked"]) == (3, 5)
    assert "found      60.0 % of 5 blocks that were asked for" in kvctl("status").out
    assert 'kvd_pool_match_blocks_found_total{device="host0",pool="chat"} 3.0' in kvctl("metrics").out


@pytest.mark.parametrize("noun", ["pool", "lease", "session"])
def test_lists_have_the_same_fields_in_every_format(kvctl: Kvctl, worker: Worker, noun: str) -> None:
    document = kvctl(noun, "list", "-o", "json").document
    (key,) = document.keys() - {"errors"}
    fields = document[key][0].keys()
    assert yaml.safe_load(kvctl(noun, "list", "-o", "yaml").out)[key][0].keys() == fields
    assert set(kvctl(noun, "list").out.splitlines()[0].split()) == fields


def test_lease_list_shows_owner_policy_and_length(kvctl: Kvctl, worker: Worker) -> None:
    answer = kvctl("lease", "list", "--pool", "chat", "-o", "json")
    assert (answer.status, answer.err) == (0, "")  # although host1 has no such pool
    dense, streaming = answer.document["leases"]
    assert (dense["lease_id"], dense["blocks"]) == (worker.dense.lease_id, 7)
    assert streaming["policy"] == "streaming(sinks=4, window=60, rope=original)"
    assert {dense["session_id"], streaming["session_id"]} == {worker.client.session_id}


def test_a_list_stops_at_its_limit_and_says_that_there_is_more(kvctl: Kvctl, worker: Worker) -> None:
    first = kvctl("lease", "list", "--limit", 1, "-o", "json")
    assert len(first.document["leases"]) == 1
    assert "show them with --all" in first.err
    everything = kvctl("lease", "list", "--all", "-o", "json")
    assert len(everything.document["leases"]) == 2
    assert everything.err == ""


def test_all_leases_come_however_many_pages_they_are(kvctl: Kvctl, run_dir: Path) -> None:
    with kvd_client.connect(run_dir, device="host1", name="many") as client:
        pool = client.pool("many", SPEC, blocks=2100)
        wishes = [kvd_client.LeaseWish(tokens=1)] * 1000
        held = [pool.lease_many(wishes) for _ in range(2)]
        answer = kvctl("lease", "list", "--all", "-o", "json")
        assert len(answer.document["leases"]) == sum(map(len, held)) == 2000
    assert kvctl("pool", "drop", "many").status == 0


def test_lease_show_has_the_block_table(kvctl: Kvctl, worker: Worker) -> None:
    record = kvctl("lease", "show", worker.dense.lease_id, "-o", "json").document
    ids = [run["start"] + i for run in record["table"] for i in range(run["count"])]
    assert ids == worker.dense.block_table.tolist()
    assert f"table           {ids[0]}-{ids[-1]}" in kvctl("lease", "show", worker.dense.lease_id).out


def test_session_list_names_the_workers_process(kvctl: Kvctl, worker: Worker) -> None:
    (session,) = kvctl("session", "list", "-o", "json").document["sessions"]
    assert (session["client_name"], session["pid"], session["leases"]) == ("decode-1", worker.pid, 2)


def test_revoke_tells_the_worker_why_and_keeps_its_blocks_from_others(kvctl: Kvctl, worker: Worker) -> None:
    answer = kvctl("lease", "revoke", worker.dense.lease_id, "--cause", "too greedy")
    assert answer.status == 0
    assert "7 blocks stay in quarantine" in answer.out
    event = worker.client.events.get(timeout=30)
    assert event == kvd_client.LeaseRevoked(worker.dense.lease_id, "too greedy")
    assert kvctl("status", "-o", "json").document["pools"][0]["blocks_quarantined"] == 7
    assert "7 blocks until their writers' processes end" in kvctl("status").out


def test_a_pool_is_created_from_a_model_and_a_size_and_dropped(kvctl: Kvctl) -> None:
    made = kvctl("pool", "create", "small", "--device", "host1", "--model", "smollm2-135m", "--size", "4MiB")
    assert (made.status, made.out) == (
        0,
        "pool small on host1 created: 10 blocks of 360 KiB, 3.9 MiB in all\n",
    )
    again = kvctl(
        *("pool", "create", "small", "--device", "host1", "--model", "smollm2-135m"),
        *("--blocks", 10, "-o", "json"),
    )
    assert (again.document["created"], again.err) == (False, "")
    other = kvctl("pool", "create", "small", "--device", "host1", "--model", "smollm2-135m", "--blocks", 12)
    assert (other.status, "was there already" in other.out) == (0, True)
    assert "it has 10 blocks, not 12; drop it and create it again to resize it" in other.err
    assert kvctl("pool", "drop", "small").out == "pool small on host1 dropped: 3.9 MiB given back\n"


def test_a_pool_is_created_from_a_geometry(kvctl: Kvctl) -> None:
    shape = ("--layers", 2, "--kv-heads", 1, "--head-dim", 8, "--head-dim-v", 4, "--dtype", "fp8")
    rest = ("--block-size", 8, "--layout", "layer_outermost", "--blocks", 5)
    made = kvctl("pool", "create", "odd", "--device", "host0", *shape, *rest, "-o", "json").document
    assert (made["head_dim_k"], made["head_dim_v"], made["dtype"]) == (8, 4, "float8_e4m3fn")
    assert (made["block_bytes"], made["blocks_total"], made["layout"]) == (192, 6, "layer_outermost")
    assert kvctl("pool", "drop", "odd").status == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_workers_attach_to_a_pool_that_was_created_from_their_models_config(
    kvctl: Kvctl, run_dir: Path, tmp_path: Path, dtype: str
) -> None:
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, dtype=dtype
    )
    config.save_pretrained(tmp_path)
    where = ("--device", "host0", "--model", tmp_path / "config.json", "--blocks", 20)
    made = kvctl("pool", "create", "llama3-8b", *where, "-o", "json").document
    assert (made["created"], made["dtype"], made["blocks_total"]) == (True, dtype, 21)
    with kvd_client.connect(run_dir, device="host0") as client:
        pool = client.pool("llama3-8b", kvd_client.KVSpec.from_hf(config))
        assert (pool.blocks, pool.lease(16).block_table.size) == (20, 1)
    assert kvctl("pool", "drop", "llama3-8b").status == 0


def test_a_pool_may_have_another_dtype_than_its_model(kvctl: Kvctl) -> None:
    model = (
        "--device",
        "host0",
        "--model",
        "smollm2-135m",
        "--blocks",
        4,
        "--dtype",
        "fp8",
        "--block-size",
        8,
    )
    assert kvctl("pool", "create", "small", *model).status == 0
    (pool,) = kvctl("pool", "list", "-o", "json").document["pools"]
    assert (pool["dtype"], pool["block_size"], pool["layers"]) == ("float8_e4m3fn", 8, 30)
    assert kvctl("pool", "drop", "small").status == 0


def test_what_fails_exits_1_and_says_what_to_do(kvctl: Kvctl, worker: Worker) -> None:
    for arguments, hint in [
        (("lease", "show", 999_999), "list the leases"),
        (("lease", "revoke", 999_999), "list the leases"),
        (("pool", "drop", "nope"), "no pool 'nope'"),
        (("pool", "drop", "chat"), "release them first"),
        (("pool", "status", "nope"), "no pool 'nope'; there is chat"),
        (("lease", "list", "--pool", "nope"), "no pool 'nope'"),
        (
            ("pool", "create", "big", "--device", "host0", "--model", "llama-3-8b", "--size", "1GiB"),
            "drop a pool",
        ),
    ]:
        answer = kvctl(*arguments)
        assert (answer.status, answer.out) == (1, ""), arguments
        assert hint in answer.err, answer.err


def test_a_new_pool_needs_a_device_where_there_are_two(kvctl: Kvctl) -> None:
    answer = kvctl("pool", "create", "small", "--model", "smollm2-135m", "--blocks", 4)
    assert answer.status == 2
    assert "choose one with --device host0 or host1" in answer.err


def test_a_name_on_two_devices_must_be_told_apart(kvctl: Kvctl) -> None:
    for device in ("host0", "host1"):
        kvctl("pool", "create", "twin", "--device", device, "--model", "smollm2-135m", "--blocks", 4)
    answer = kvctl("pool", "drop", "twin")
    assert (answer.status, "pool twin is on host0 and host1" in answer.err) == (2, True)
    assert [kvctl("pool", "drop", "twin", "--device", device).status for device in ("host0", "host1")] == [
        0,
        0,
    ]


def test_one_device_that_is_away_hides_no_other(kvctl: Kvctl, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "host0").symlink_to(run_dir / "host0")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "lock").touch()
    answer = kvctl("pool", "status", "--run-dir", tmp_path, "-o", "json")
    assert answer.status == 1
    assert [device["health"] for device in answer.document["devices"]] == ["unreachable", "serving"]
    listing = kvctl("session", "list", "--run-dir", tmp_path, "-o", "json")
    assert (listing.status, [error["device"] for error in listing.document["errors"]]) == (1, ["gone"])
    assert "error: gone: no daemon answers" in listing.err


def test_a_single_devices_folder_is_an_endpoint_too(kvctl: Kvctl, run_dir: Path) -> None:
    document = kvctl("status", "--run-dir", run_dir / "host1", "-o", "json").document
    assert [device["device"] for device in document["devices"]] == ["host1"]


def test_the_endpoint_may_come_from_the_environment(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_ENDPOINT", str(run_dir))
    assert kvd_client.cli.main(["status"]) == 0
    assert capsys.readouterr().out.startswith("host0  serving")


def test_watch_draws_the_page_again_until_it_is_interrupted(run_dir: Path) -> None:
    program = Path(sys.executable).with_name("kvctl")
    command = [str(program), "--run-dir", str(run_dir), "status", "--watch", "0.1"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as watching:
        assert watching.stdout is not None
        heads = (line for line in watching.stdout if line.startswith("host0  serving"))
        assert [next(heads)[:5], next(heads)[:5]] == ["host0", "host0"]
        watching.send_signal(2)
        assert watching.wait(30) == 0


def test_what_is_shelved_and_what_is_pinned_is_listed_and_can_be_ended(kvctl: Kvctl, worker: Worker) -> None:
    pool = worker.dense.pool
    hashes = [bytes([depth]) * 32 for depth in range(6)]
    worker.dense.seal(hashes)
    match = pool.match(hashes[:4], ttl=60.0)
    worker.streaming.publish("to whom it may concern", ttl=600)
    page = kvctl("pool", "status", "chat").out
    assert "shelved    1 lease published and not adopted yet: kvctl lease list" in page
    assert "pinned     4 blocks: kvctl pin list" in page
    [shelved] = [
        lease
        for lease in kvctl("lease", "list", "-o", "json").document["leases"]
        if lease["state"] == "shelved"
    ]
    assert (shelved["shelf_key"], shelved["session_id"]) == ("to whom it may concern", "")
    assert shelved["shelf_ttl_seconds"] > 500
    [pin] = kvctl("pin", "list", "--pool", "chat", "-o", "json").document["pins"]
    assert (pin["pin_id"], pin["blocks"]) == (match.pin_id, 4)
    assert (pin["session_id"], pin["device"]) == (worker.client.session_id, "host0")
    assert pin["ttl_seconds"] > 30
    assert kvctl("pin", "drop", pin["pin_id"]).out.startswith(f"pin {pin['pin_id']} on host0 ended: 4 blocks")
    assert kvctl("pin", "drop", pin["pin_id"]).status == 1
    assert kvctl("pin", "list", "-o", "json").document["pins"] == []
    assert kvctl("lease", "revoke", shelved["lease_id"]).status == 0
