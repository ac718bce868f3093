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
    return start_router(message, "sglang-router", "sglang_router.launch_router")


def start_router(message: Message, package: str, module: str) -> Proxy:
    """A router of language models, which are all launched with the same flags."""
    port, python = free_port(), message["program"]
    urls = [f"http://{HOST}:{each}" for each in message["ports"]]
    command = [python, "-m", module, "--host", HOST, "--port", str(port)]
    command += ["--policy", "power_of_two", "--log-level", "error", "--worker-urls", *urls]
    command += ["--prometheus-port", str(free_port())]
    asked = f"import importlib.metadata as m; print('{package}', m.version('{package}'))"
    return CommandProxy(command, port, version_of([python, "-c", asked]))


if __name__ == "__main__":
    serve(start)
