"""Pools that come and go while the kernel worker is busy."""

import os
import signal

import grpc
import numpy as np
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc

from .geometry import SPEC

QUERIES = np.zeros((SPEC.layers, 32, 4, SPEC.head_dim_k), np.float32)


def test_a_pool_dropped_before_the_kernel_worker_mapped_it_costs_nobody_their_worker(kvd: RunningKvd) -> None:
    with (
        kvd_client.connect(kvd.run_dir) as client,
        grpc.insecure_channel(f"unix:{kvd.run_dir}/host0/grpc.sock") as channel,
    ):
        admin = rpc.AdminServiceStub(channel)
        eventually(lambda: admin.GetStatus(pb.GetStatusRequest()).health == "serving", "a kernel worker")
        kernel_pid = kvd.kernel_pid()
        os.kill(kernel_pid, signal.SIGSTOP)
        pools = [client.pool(name, SPEC, 16) for name in ("kept", "dropped")]
        admin.DropPool(pb.DropPoolRequest(name="dropped"), timeout=PATIENCE_S)
        os.kill(kernel_pid, signal.SIGCONT)
        with pools[0].lease(tokens=160) as lease:
            lease.extend(160)
            lease.commit(160)
            report = lease.compress(kvd_client.SnapKV(keep=0.5), QUERIES)
        assert report.blocks_after == 5
        assert kvd.kernel_pid() == kernel_pid
    assert "Traceback" not in kvd.log.read_text()
