"""Which gRPC server answers a small unary call faster: grpc.aio or the sync thread pool?

Each server runs in a process of its own on a Unix socket and echoes bytes; one client thread in this
process calls it in turns, the servers interleaved so that a noisy neighbour hits both alike.
Printed: p50 and p99 of the round trip, and CPU per call of the server process.

    python benchmarks/bench_echo_server.py [calls]
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from pathlib import Path

import grpc
import grpc.aio

METHOD = "/bench.Echo/Echo"
ROUNDS = 10  # both servers take turns this often
PAYLOAD = b"x" * 64  # bytes; a lease request is about this long
READY_TIMEOUT_S = 20.0


def generic_handler(behaviour: object) -> grpc.GenericRpcHandler:
    handler = grpc.unary_unary_rpc_method_handler(behaviour)  # type: ignore[arg-type]
    return grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler})


def serve_sync(socket: str) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers((generic_handler(lambda request, context: request),))
    server.add_insecure_port(socket)
    server.start()
    server.wait_for_termination()


async def serve_aio(socket: str) -> None:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((generic_handler(echo),))
    server.add_insecure_port(socket)
    await server.start()
    await server.wait_for_termination()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def round_trips_us(call: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", count: int) -> list[float]:
    taken = []
    for _ in range(count):
        started = time.perf_counter_ns()
        call(PAYLOAD)
        taken.append((time.perf_counter_ns() - started) / 1e3)
    return taken


def compare(folder: str, calls: int) -> None:
    """Prints one line per server."""
    kinds = ("sync", "aio")
    servers = {
        kind: subprocess.Popen([sys.executable, __file__, kind, f"unix:{folder}/{kind}"]) for kind in kinds
    }
    try:
        stubs = {}
        for kind in kinds:
            channel = grpc.insecure_channel(f"unix:{folder}/{kind}")
            grpc.channel_ready_future(channel).result(timeout=READY_TIMEOUT_S)
            stubs[kind] = channel.unary_unary(METHOD)
            round_trips_us(stubs[kind], 200)
        before = {kind: cpu_seconds(servers[kind].pid) for kind in kinds}
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind in kinds:
                taken[kind] += round_trips_us(stubs[kind], calls // ROUNDS)
        for kind in kinds:
            cpu_us = (cpu_seconds(servers[kind].pid) - before[kind]) / len(taken[kind]) * 1e6
            cuts = statistics.quantiles(taken[kind], n=100)
            print(
                f"{kind:5} p50 {cuts[49]:6.0f} us   p99 {cuts[98]:6.0f} us   server CPU {cpu_us:5.0f} us/call"
            )
    finally:
        for server in servers.values():
            server.kill()
            server.wait()


def main() -> None:
    match sys.argv[1:]:
        case ["sync", socket]:
            serve_sync(socket)
        case ["aio", socket]:
            asyncio.run(serve_aio(socket))
        case arguments:
            with tempfile.TemporaryDirectory() as folder:
                compare(folder, int(arguments[0]) if arguments else 5000)


if __name__ == "__main__":
    main()
