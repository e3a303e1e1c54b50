"""A bug in the daemon: typed for the caller, logged by number, and red for the health check."""

import asyncio
import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon.engine import engine as engine_module
from kvd_daemon.engine.health import HealthState
from kvd_daemon.rpc.server import Server

from .engine_room import DyingCommand, running_engine
from .raw_worker import error_info


def test_a_bug_is_answered_with_an_incident_and_turns_health_red(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with running_engine(DyingCommand(1, tmp_path)) as engine:
            server = Server(engine, str(tmp_path / "grpc.sock"))
            await server.start()
            del engine.device.pools  # the bug
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/grpc.sock") as channel:
                pools = kvd_pb2_grpc.PoolServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await pools.GetPool(pb.GetPoolRequest(name="pool"))
                assert failure.value.code() is grpc.StatusCode.INTERNAL
                incident = error_info(failure.value).metadata["incident"]
                assert f"incident {incident} in GetPool" in caplog.text
                assert incident in engine.health.detail
                health = health_pb2_grpc.HealthStub(channel)
                seen = await health.Check(health_pb2.HealthCheckRequest(service="kvd.v1.PoolService"))
                assert seen.status == health_pb2.HealthCheckResponse.NOT_SERVING
            await server.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())


def test_an_invariant_that_does_not_hold_is_found_when_nobody_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(engine_module, "IDLE_BEFORE_CHECK_S", 0.0)

    async def story() -> None:
        from kvd.spec import KVSpec

        async with running_engine(DyingCommand(1, tmp_path)) as engine:
            red = asyncio.Event()
            engine.health.listen(lambda: red.set() if engine.health.state is HealthState.FAILING else None)
            pool, _ = engine.pools.create("pool", KVSpec(1, 1, 8, 8), 10)
            pool.blocks.generation[:] = 0
            pool.blocks.state[3] = 4
            await asyncio.wait_for(red.wait(), 60)
            assert "an invariant does not hold" in engine.health.detail

    asyncio.run(story())
