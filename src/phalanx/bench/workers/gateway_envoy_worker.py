"""Envoy with `LEAST_REQUEST` over all servers, one worker thread, no access log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command_loop import Message  # type: ignore[import-not-found]
from gateway_proxy_process import (  # type: ignore[import-not-found]
    HOST,
    CommandProxy,
    Proxy,
    free_port,
    serve,
    version_of,
)

_TYPES = "type.googleapis.com/envoy.extensions"
_MANAGER = f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = f"{_TYPES}.filters.http.router.v3.Router"
_PROTOCOLS = f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions"
_LEAST_REQUEST = f"{_TYPES}.load_balancing_policies.least_request.v3.LeastRequest"


def start(message: Message) -> Proxy:
    port, grpc_port = free_port(), free_port()
    config = {
        "static_resources": {
            "listeners": [_listener("http", port), _listener("grpc", grpc_port)],
            "clusters": [
                _cluster("http", message["ports"], {"http_protocol_options": {}}),
                _cluster("grpc", message["grpc_ports"], {"http2_protocol_options": {}}),
            ],
        }
    }
    file = Path(message["scratch"]) / "envoy.json"
    file.write_text(json.dumps(config))
    program = message["program"]
    command = [program, "--config-path", str(file), "--concurrency", "1"]
    command += ["--disable-hot-restart", "--log-level", "error"]
    return CommandProxy(command, port, version_of([program, "--version"]), grpc_port=grpc_port)


def _listener(name: str, port: int) -> dict[str, Any]:
    route = {"cluster": name, "timeout": "0s"}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": name,
        "codec_type": "AUTO",
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": name,
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}}],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": name, "address": _address(port), "filter_chains": [{"filters": filters}]}


def _cluster(name: str, ports: list[int], protocol: dict[str, Any]) -> dict[str, Any]:
    options = {"@type": _PROTOCOLS, "explicit_http_config": protocol}
    # Of two servers each, every request looks at both.
    least = {"@type": _LEAST_REQUEST, "selection_method": "FULL_SCAN"}
    policy = {"name": "envoy.load_balancing_policies.least_request", "typed_config": least}
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {_PROTOCOLS.partition("/")[2]: options},
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}


if __name__ == "__main__":
    serve(start)
