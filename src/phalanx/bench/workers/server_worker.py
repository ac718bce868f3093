"""Phalanx behind its model server, in a process of its own, over HTTP on this machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
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


class Server:
    def __init__(self, start: Start) -> None:
        self._options = start.options
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-bench-")
        log = Path(self._folder.name) / "server.log"
        config = Path(self._folder.name) / "serve.yaml"
        config.write_text(json.dumps(_configuration(start)))
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", str(config)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._url = _announced_url(self._process, log)

    def describe(self) -> str:
        import phalanx

        chosen = "".join(f", {name} {value}" for name, value in self._options.items())
        return f"phalanx {phalanx.__version__} behind its model server (POST /generate){chosen}"

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> Generation:
        recorder = Recorder()
        return recorder.finish(asyncio.run(self._all(prompts, max_new_tokens, concurrency)))

    def score(self, prompts: list[list[int]]) -> Scoring:
        raise NotImplementedError("scoring is measured on the bare engine")

    def flush(self) -> None:
        httpx.post(f"{self._url}/flush_cache", timeout=None).raise_for_status()

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


def _configuration(start: Start) -> dict[str, object]:
    return {
        "plugin": "causal_lm",
        "server": {"port": 0},
        "engine": {"device": "cpu", "dtype": start.dtype, "num_threads": start.threads},
        "plugin_args": {
            "checkpoint_dir": start.model,
            "context_length": start.max_length,
            "pool_tokens": start.kv_tokens,
            "max_batch_size": start.max_concurrency,
            **start.options,
        },
    }


def _announced_url(process: subprocess.Popen[str], log: Path) -> str:
    """Where the server listens, from the line that it prints when it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if " at http" in line:
            return line.rsplit(" at ", 1)[1].strip()
    raise RuntimeError(f"the model server ended before it was ready:\n{log.read_text()[-2000:]}")


if __name__ == "__main__":
    serve(Server)
