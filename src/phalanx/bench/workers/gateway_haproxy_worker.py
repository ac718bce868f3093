"""HAProxy with `leastconn`, one thread."""

from __future__ import annotations

from pathlib import Path

from command_loop import Message  # type: ignore[import-not-found]
from gateway_proxy_process import (  # type: ignore[import-not-found]
    CommandProxy,
    Proxy,
    free_port,
    serve,
    version_of,
)

_CONFIG = """
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout tunnel 60s
frontend front
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance leastconn
  http-reuse always
{servers}
frontend grpc
  bind 127.0.0.1:{grpc_port} proto h2
  default_backend grpcs
backend grpcs
  balance leastconn
  http-reuse always
{grpc_servers}
"""


def start(message: Message) -> Proxy:
    port, grpc_port = free_port(), free_port()
    grpc_servers = "\n".join(
        f"  server g{each} 127.0.0.1:{each} proto h2" for each in message["grpc_ports"]
    )
    servers = "\n".join(f"  server s{each} 127.0.0.1:{each}" for each in message["ports"])
    config = Path(message["scratch"]) / "haproxy.cfg"
    config.write_text(
        _CONFIG.format(port=port, servers=servers, grpc_port=grpc_port, grpc_servers=grpc_servers)
    )
    program = message["program"]
    command = [program, "-db", "-f", str(config)]
    return CommandProxy(command, port, version_of([program, "-v"]), grpc_port=grpc_port)


if __name__ == "__main__":
    serve(start)
