"""A lease goes from process to process; whoever is killed on the way, it has exactly one owner."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.client.daemon import Daemon
from tests.daemon.raw_worker import RawWorker, at, fresh_id
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd.v1 import kvd_pb2 as pb

from .filling import fill, values
from .test_daemon_dies import kill_daemon
from .workers import Worker, worker

PREFILL = """
client = kvd_client.connect(run_dir, timeout=60)
pool = client.pool("pool", SPEC, 64)
lease = pool.lease()
rows = np.arange(40, dtype=np.float32)[:, None, None].repeat(8, 2)
lease.write(0, lease.extend(40), rows, -rows)
lease.commit(40)
say(*lease.block_table[:3])
if hear() == "publish":
    lease.publish("sequence", ttl=600)
    say("published", outcome(lease.check), outcome(lease.release))
hear()
"""
DECODE = """
client = kvd_client.connect(run_dir, timeout=60)
pool = client.pool("pool", SPEC, 64)
say("ready")
lease = pool.adopt(hear(), wait=60)
k, v = lease.gather(0, "numpy")
assert (k[:, 0, 0] == np.arange(40)).all() and (v == -k).all()
fill(lease, 16, 7.0)
say("decoded", lease.length, *lease.block_table[:3])
hear()
"""


@pytest.fixture
def client(daemon: Daemon) -> Iterator[kvd_client.Client]:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def pool(client: kvd_client.Client, spec: kvd_client.KVSpec) -> kvd_client.Pool:
    return client.pool("pool", spec, 64)


def published(publisher: Worker) -> str:
    """What it says of its block table, once it has given the lease away."""
    table = publisher.hear()
    assert publisher.ask("publish") == "published ClosedError fine"
    return table


def adopted(pool: kvd_client.Pool) -> kvd_client.Lease:
    """The publisher's lease, with its bytes."""
    lease = pool.adopt("sequence")
    k, v = lease.gather(0, "numpy")
    assert (k[:, 0, 0] == np.arange(40)).all()
    assert (v == -k).all()
    assert (lease.length, lease.position, lease.generation) == (40, 40, 3)
    return lease


def test_one_process_prefills_and_another_decodes_in_the_same_blocks(pool, kvd: RunningKvd) -> None:
    with worker(kvd.run_dir, DECODE) as decoder, worker(kvd.run_dir, PREFILL) as prefiller:
        assert decoder.hear() == "ready"
        decoder.tell("sequence")  # it waits for what is not there yet
        table = published(prefiller)
        assert decoder.hear() == f"decoded 56 {table}"
        with pytest.raises(kvd_client.OfferNotFoundError):
            pool.adopt("sequence")


def test_a_publisher_killed_before_it_publishes_leaves_nothing_to_adopt(pool, daemon: Daemon, kvd) -> None:
    with worker(kvd.run_dir, PREFILL) as prefiller:
        prefiller.hear()
        prefiller.kill()
        eventually(lambda: daemon.pool_status("pool").blocks_free == 64, "its blocks")
        with pytest.raises(kvd_client.OfferNotFoundError):
            pool.adopt("sequence")


def test_a_publisher_killed_after_it_published_is_not_needed_any_more(pool, daemon: Daemon, kvd) -> None:
    with worker(kvd.run_dir, PREFILL) as prefiller:
        published(prefiller)
        before = daemon.session_names()
        prefiller.kill()
        eventually(lambda: len(daemon.session_names()) < len(before), "its session's end")
        assert daemon.pool_status("pool").leases_shelved == 1
        lease = adopted(pool)
        assert daemon.pool_status("pool").leases_shelved == 0
        lease.release()
        assert daemon.pool_status("pool").blocks_free == 64


def test_an_adopter_killed_while_it_waits_takes_nothing_with_it(pool, daemon: Daemon, kvd) -> None:
    with worker(kvd.run_dir, DECODE) as decoder, worker(kvd.run_dir, PREFILL) as prefiller:
        assert decoder.hear() == "ready"
        decoder.tell("sequence")
        before = daemon.session_names()
        decoder.kill()
        eventually(lambda: len(daemon.session_names()) < len(before), "its session's end")
        published(prefiller)
        adopted(pool).release()


def test_an_adopter_killed_after_it_adopted_gives_its_blocks_back(pool, daemon: Daemon, kvd) -> None:
    with worker(kvd.run_dir, PREFILL) as prefiller, worker(kvd.run_dir, DECODE) as decoder:
        published(prefiller)
        assert decoder.hear() == "ready"
        assert decoder.ask("sequence").startswith("decoded")
        decoder.kill()
        eventually(lambda: daemon.pool_status("pool").blocks_free == 64, "its blocks")
        with pytest.raises(kvd_client.OfferNotFoundError):
            pool.adopt("sequence")


def test_a_daemon_killed_between_publish_and_adopt_forgets_neither_lease_nor_bytes(pool, daemon, kvd) -> None:
    with worker(kvd.run_dir, PREFILL) as prefiller:
        published(prefiller)
        prefiller.kill()
        kill_daemon(kvd)
        assert daemon.status().recovery.leases == 1
        with adopted(pool) as lease:
            fill(lease, 100, 5.0)


def test_an_adoption_that_waits_goes_on_waiting_for_the_next_daemon(pool, daemon: Daemon, kvd) -> None:
    with worker(kvd.run_dir, PREFILL) as prefiller:
        found: list[kvd_client.Lease] = []
        waiting = threading.Thread(target=lambda: found.append(pool.adopt("sequence", wait=PATIENCE_S)))
        waiting.start()
        kill_daemon(kvd)
        published(prefiller)
        waiting.join(PATIENCE_S)
        assert found[0].length == 40


def test_publish_and_adopt_repeated_to_another_daemon_are_carried_out_once(daemon: Daemon, kvd) -> None:
    giver = RawWorker(kvd.run_dir)
    giver.create_pool()
    [lease] = giver.lease(40)
    publish = pb.PublishRequest(
        session_token=giver.token, request_id=fresh_id(), progress=at(lease, 40), key="sequence"
    )
    giver.shares.Publish(publish, timeout=PATIENCE_S)
    kill_daemon(kvd)
    taker = RawWorker(kvd.run_dir)
    again = RawWorker(kvd.run_dir, resume_token=giver.token)
    assert again.shares.Publish(publish, timeout=PATIENCE_S).key == "sequence"
    adopt = pb.AdoptRequest(session_token=taker.token, request_id=fresh_id(), pool="pool", key="sequence")
    first = taker.shares.Adopt(adopt, timeout=PATIENCE_S)
    kill_daemon(kvd)
    resumed = RawWorker(kvd.run_dir, resume_token=taker.token)
    assert resumed.shares.Adopt(adopt, timeout=PATIENCE_S).lease == first.lease
    assert again.shares.Publish(publish, timeout=PATIENCE_S).key == "sequence"  # nothing is shelved again
    assert resumed.pool_status().leases_shelved == 0
    assert daemon.lease_info(lease.lease_id).session_id == taker.opened.session_id
    for each in (giver, taker):
        each.vanish()
    for each in (again, resumed):
        each.close()


def test_what_nobody_adopts_comes_back_after_its_time(pool, daemon: Daemon) -> None:
    lease = pool.lease()
    fill(lease, 40, 1.0)
    lease.publish("sequence", ttl=0.05)
    with pytest.raises(kvd_client.ClosedError, match="published under 'sequence'"):
        lease.extend(1)
    eventually(lambda: daemon.pool_status("pool").blocks_free == 64, "the blocks")
    with pytest.raises(kvd_client.OfferNotFoundError):
        pool.adopt("sequence", wait=0.05)


def test_a_key_is_one_leases_and_free_again_when_it_was_adopted(pool) -> None:
    first, second = pool.lease(tokens=16), pool.lease(tokens=16)
    first.publish("sequence")
    with pytest.raises(kvd_client.ShelfKeyTakenError, match=f"lease {first.lease_id}"):
        second.publish("sequence")
    fill(second, 16, 2.0)  # it is still ours
    back = pool.adopt("sequence")
    assert back.lease_id == first.lease_id
    second.publish("sequence")


def test_a_transferred_lease_is_for_its_receiver_alone_who_is_told_once(pool, client, daemon, kvd) -> None:
    lease = pool.lease()
    fill(lease, 40, 3.0)
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as receiver:
        with pytest.raises(kvd_client.ReceiverNotFoundError):
            lease.transfer("nobody")
        lease.transfer(receiver.session_id)
        kill_daemon(kvd)  # the next one tells it again
        offer = receiver.offers.get(PATIENCE_S)
        assert offer is not None
        assert (offer.pool, offer.lease_id) == ("pool", lease.lease_id)
        with pytest.raises(kvd_client.OfferNotFoundError):
            pool.adopt(offer.key)
        mine = receiver.pool(offer.pool).adopt(offer.key)
        assert values(mine) == {3.0}
        assert (receiver.offers.drain(), client.offers.drain()) == ([], [])


def test_a_compressed_lease_goes_on_with_its_positions_policy_and_scores(pool, daemon: Daemon) -> None:
    policy = kvd_client.H2O(sinks=2, recent=10, keep=0.5)
    lease = pool.lease(policy=policy)
    rows = np.random.default_rng(5).standard_normal((80, 1, 8)).astype(np.float32)
    lease.write(0, lease.extend(80), rows, rows)
    lease.commit(80)
    queries = np.random.default_rng(6).standard_normal((1, 80, 2, 8)).astype(np.float32)
    kept_tokens = lease.compress(queries=queries).tokens_kept
    kept, bytes_before = lease.kept_positions(), lease.gather(0, "numpy")[0]
    lease.publish("sequence")
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as other:
        mine = other.pool("pool").adopt("sequence")
        assert (mine.policy, mine.length, mine.position) == (policy, kept_tokens, 80)
        assert (mine.kept_positions() == kept).all()
        assert (mine.gather(0, "numpy")[0] == bytes_before).all()
        fill(mine, 20, 9.0)
        assert mine.compress().tokens_before == 68  # by the running scores it came with
        assert mine.kept_positions()[0, 0, -10:].tolist() == list(range(90, 100))


def test_a_streaming_lease_goes_on_in_its_ring(pool) -> None:
    ring = pool.lease(policy=kvd_client.Streaming(sinks=4, window=28))
    for value in range(10):
        fill(ring, 16, float(value))
    ring.publish("stream")
    back = pool.adopt("stream")
    fill(back, 16, 10.0)
    k, _ = back.gather(0, "numpy")
    assert back.position == 176
    assert k[:4, 0, 0].tolist() == [0.0] * 4
    assert k[-28:, 0, 0].tolist() == [9.0] * 12 + [10.0] * 16


def test_an_operator_sees_what_is_on_the_shelf_and_takes_it_away(pool, daemon: Daemon) -> None:
    lease = pool.lease(tokens=40)
    lease.publish("sequence", ttl=600)
    info = daemon.lease_info(lease.lease_id)
    assert (info.state, info.shelf_key, info.session_id) == ("shelved", "sequence", "")
    assert info.shelf_ttl.seconds > 500
    daemon.revoke(lease.lease_id, "not needed")
    assert daemon.pool_status("pool").blocks_free == 64
    with pytest.raises(kvd_client.OfferNotFoundError):
        pool.adopt("sequence")
