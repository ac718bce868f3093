"""vllm-router, run by the interpreter of its own environment."""

from __future__ import annotations

from command_loop import Message  # type: ignore[import-not-found]
from gateway_proxy_process import Proxy, serve  # type: ignore[import-not-found]
from gateway_router_worker import start_router  # type: ignore[import-not-found]


def start(message: Message) -> Proxy:
    return start_router(message, "vllm-router", "vllm_router.launch_router")


if __name__ == "__main__":
    serve(start)
