"""Phalanx behind its model server, in a process of its own, over HTTP on this machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from worker_protocol import (  # type: ignore[import-not-found]
    Generation,
    Recorder,
    Scoring,
    Start,
    serve,
)

COMMAND = "from phalanx.cli.main import main; main()"
READY_TIMEOUT_S = 300.0


class Server:
    def __init__(self, start: Start) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-bench-")
        log = Path(self._folder.name) / "server.log"
        config = Path(self._folder.name) / "serve.yaml"
        port = _free_port()
        config.write_text(json.dumps(_configuration(start, port)))
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", str(config)],
                stdout=output,
                stderr=output,
            )
        self._url = f"http://127.0.0.1:{port}"
        _wait_until_ready(self._process, self._url, log)

    def describe(self) -> str:
        import phalanx

        return f"phalanx {phalanx.__version__} behind its model server (POST /generate)"

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> Generation:
        recorder = Recorder()
        return recorder.finish(asyncio.run(self._all(prompts, max_new_tokens, concurrency)))

    def score(self, prompts: list[list[int]]) -> Scoring:
        raise NotImplementedError("scoring is measured on the bare engine")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    async def _all(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> list[list[int]]:
        places = asyncio.Semaphore(concurrency)
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}

        async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
            async with places:
                body = {"input_ids": prompt, "sampling_params": sampling}
                response = await client.post(f"{self._url}/generate", json=body)
                response.raise_for_status()
                return list(response.json()["output_ids"])

        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


def _configuration(start: Start, port: int) -> dict[str, object]:
    return {
        "plugin": "causal_lm",
        "server": {"port": port},
        "engine": {"device": "cpu", "dtype": start.dtype, "num_threads": start.threads},
        "plugin_args": {
            "checkpoint_dir": start.model,
            "context_length": start.max_length,
            "pool_tokens": start.kv_tokens,
            "max_batch_size": start.max_concurrency,
            **start.options,
        },
    }


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    process.terminate()
    raise RuntimeError(f"the model server did not become ready:\n{log.read_text()[-2000:]}")


if __name__ == "__main__":
    serve(Server)
