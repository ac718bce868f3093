"""A proxy in front of any engine, with faults that can be switched on and off for each path.

```sh
python -m phalanx.testing.fault_server --upstream http://127.0.0.1:30000 --port 30001 --control-port 30002
curl -d '{"kind": "status", "path": "/release_memory_occupation", "times": 1}' http://127.0.0.1:30002/faults
curl -X DELETE http://127.0.0.1:30002/faults
```

Callers are given port 30001 as the engine's. What can go wrong is listed at `FaultKind`; without a
fault bytes pass as they are, streams too. The second port controls it:

| request | does |
|---|---|
| `POST /faults` | sets a fault, whose fields are those of `Fault`; answers `{"id": N}` |
| `GET /faults` | which are set, and how often each may still happen |
| `DELETE /faults`, `/faults/N` | lifts all, or one; what it holds goes on |
| `GET /calls` | the requests so far: method, path, status, the fault that happened |
| `GET /wait?path=P&count=N` | answers when N requests of path P have come |
| `POST /crash` | the engine is gone: connections are lost, and refused from then on |
| `POST /revive` | it is back at the same address; `{"upstream": URL}`: in front of another one |

In Python the same is

```python
async with FaultServer("http://127.0.0.1:30000") as server:
    server.add(lost_response("/release_memory_occupation"))
    ...  # give server.url to whoever is tested
    await server.arrived("/generate", 1)
```
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import msgspec

from phalanx.testing.fault_proxy import Call, FaultServer
from phalanx.testing.faults import Fault, FaultKind, crashes_as_sglang, lost_response
from phalanx.testing.raw_http import RawRequest, answer, read_request

__all__ = [
    "Call",
    "Fault",
    "FaultControlPort",
    "FaultKind",
    "FaultServer",
    "crashes_as_sglang",
    "lost_response",
]


class FaultControlPort:
    """The routes that control a `FaultServer`, at a port of their own."""

    def __init__(self, server: FaultServer) -> None:
        self._controlled = server

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Answers from now on, until what this returns is closed."""
        return await asyncio.start_server(self._serve, host, port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await read_request(reader, writer)
            if request is not None:
                writer.write(answer(*await self._answer(request)))
        except (ValueError, msgspec.ValidationError) as error:
            writer.write(answer(400, {"error": {"message": str(error)}}))
        finally:
            writer.close()

    async def _answer(self, request: RawRequest) -> tuple[int, object]:
        server, (_, what, *rest) = self._controlled, request.path.split("/")
        match request.method, what, rest:
            case "POST", "faults", []:
                fault = msgspec.convert(request.json(), Fault)
                return 200, {"id": server.add(fault)}
            case "GET", "faults", []:
                return 200, server.faults.shown()
            case "DELETE", "faults", ([] | [_]):
                server.lift(int(rest[0]) if rest else None)
            case "GET", "calls", []:
                return 200, [msgspec.to_builtins(call) for call in server.calls]
            case "GET", "wait", []:
                query = request.query
                await server.arrived(query.get("path", ""), int(query.get("count", "1")))
            case "POST", "crash", []:
                server.crash()
            case "POST", "revive", []:
                body = request.json()
                await server.revive(body.get("upstream") if isinstance(body, dict) else None)
            case _:
                return 404, {"error": {"message": f"{request.method} {request.path}: not found"}}
        return 200, {}


async def _run(given: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = FaultServer(given.upstream, host=given.host, port=given.port)
    async with (
        server,
        await FaultControlPort(server).listen(given.host, given.control_port) as port,
    ):
        control = port.sockets[0].getsockname()[1]
        sys.stdout.write(f"faults at {server.url}, control at http://{given.host}:{control}\n")
        sys.stdout.flush()
        await stop.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="phalanx.testing.fault_server",
        description="A proxy in front of an engine, in which faults can be switched on and off.",
    )
    parser.add_argument("--upstream", required=True, help="the engine, http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=0, help="the engine's, to callers; 0: a free one"
    )
    parser.add_argument("--control-port", type=int, default=0)
    asyncio.run(_run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
