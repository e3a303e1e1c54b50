"""An empty gRPC echo: what any answer over this kind of server and socket costs at least.

    python -m rpc_bench.echo SOCKET

The same server as the daemon's (grpc.aio, one event loop, its options), the same kind of socket, no work.
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio

METHOD = "/kvd.bench.Echo/Echo"
OPTIONS = (("grpc.max_concurrent_streams", 1024), ("grpc.so_reuseport", 0))


async def serve(socket: str) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.method_handlers_generic_handler(
        "kvd.bench.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    )
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
