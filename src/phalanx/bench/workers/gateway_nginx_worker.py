"""nginx with `least_conn`, one worker, connections to the backends kept."""

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
daemon off; worker_processes 1; pid {scratch}/nginx.pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 100m; client_body_buffer_size 1m;
  client_body_temp_path {scratch}/body; proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/f; uwsgi_temp_path {scratch}/u; scgi_temp_path {scratch}/s;
  keepalive_requests 10000000; tcp_nodelay on;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream backends {{ least_conn; {servers} keepalive 64; keepalive_requests 10000000; }}
  upstream grpcs {{ least_conn; {grpc_servers} keepalive 64; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{grpc_port} http2; http2_max_concurrent_streams 1024;
    location / {{ grpc_pass grpc://grpcs; }}
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://backends; proxy_http_version 1.1;
      proxy_set_header Connection $connection_upgrade; proxy_set_header Upgrade $http_upgrade;
      proxy_request_buffering off; proxy_buffering off;
    }}
  }}
}}
"""


def start(message: Message) -> Proxy:
    scratch, port, grpc_port = Path(message["scratch"]), free_port(), free_port()
    servers = _listed(message["ports"])
    grpc_servers = _listed(message["grpc_ports"])
    config = scratch / "nginx.conf"
    config.write_text(
        _CONFIG.format(
            scratch=scratch,
            port=port,
            grpc_port=grpc_port,
            servers=servers,
            grpc_servers=grpc_servers,
        )
    )
    program = message["program"]
    command = [program, "-c", str(config)]
    return CommandProxy(command, port, version_of([program, "-v"]), grpc_port=grpc_port)


def _listed(ports: list[int]) -> str:
    return " ".join(f"server 127.0.0.1:{port};" for port in ports)


if __name__ == "__main__":
    serve(start)
