"""sglang-router, run by the interpreter of its own environment."""

from __future__ import annotations

from command_loop import Message  # type: ignore[import-not-found]
from gateway_proxy_process import (  # type: ignore[import-not-found]
    HOST,
    CommandProxy,
    Proxy,
    free_port,
    serve,
    version_of,
)


def start(message: Message) -> Proxy:
    port, python = free_port(), message["program"]
    urls = [f"http://{HOST}:{each}" for each in message["ports"]]
    command = [python, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)]
    command += ["--policy", "power_of_two", "--log-level", "warn", "--worker-urls", *urls]
    command += ["--prometheus-port", str(free_port())]
    asked = "import importlib.metadata as m; print('sglang-router', m.version('sglang-router'))"
    return CommandProxy(command, port, version_of([python, "-c", asked]))


if __name__ == "__main__":
    serve(start)
