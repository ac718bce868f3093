"""Phalanx itself, through its public Engine, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from worker_protocol import (  # type: ignore[import-not-found]
    Generation,
    Recorder,
    Scoring,
    Start,
    serve,
)

from phalanx.engine.engine import Engine
from phalanx.engine.registry import plugin_class
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.schema.control import Flush
from phalanx.schema.generate import GenerateOutput, GenerateRequest, LogprobOptions
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.sampling import SamplingParams

PLUGIN = "causal_lm"


class Phalanx:
    """`options` are further arguments of the plugin, such as `quantization`."""

    def __init__(self, start: Start) -> None:
        values = {
            "checkpoint_dir": start.model,
            "context_length": start.max_length,
            "pool_tokens": start.kv_tokens,
            "max_batch_size": start.max_concurrency,
            **start.options,
        }
        args = build_plugin_args(plugin_class(PLUGIN).args_cls, values, "benchmark")
        config = EngineConfig(
            DeviceConfig("cpu", start.dtype), RuntimeConfig(num_threads=start.threads)
        )
        self._options = start.options
        self._engine = Engine(EngineArgs(PLUGIN, args, config))

    def describe(self) -> str:
        import torch

        import phalanx

        chosen = "".join(f", {name} {value}" for name, value in self._options.items())
        return f"phalanx {phalanx.__version__}, torch {torch.__version__}{chosen}"

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> Generation:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)
        requests = [
            GenerateRequest(input_ids=tuple(prompt), sampling=sampling, detokenize=False)
            for prompt in prompts
        ]
        recorder = Recorder()
        if concurrency == 1:
            return recorder.finish([self._streamed(recorder, request) for request in requests])
        return recorder.finish(self._submitted(requests, concurrency))

    def flush(self) -> None:
        if not self._engine.control(Flush()):
            raise RuntimeError("the engine did not flush its cache; are requests running?")

    def close(self) -> None:
        self._engine.close()

    def score(self, prompts: list[list[int]]) -> Scoring:
        requests = [
            GenerateRequest(
                input_ids=tuple(prompt),
                sampling=SamplingParams(max_new_tokens=0),
                logprobs=LogprobOptions(prompt_start=0),
                detokenize=False,
            )
            for prompt in prompts
        ]
        began = time.perf_counter()
        outputs = [future.result() for future in map(self._engine.submit, requests)]
        seconds = time.perf_counter() - began
        values = [value for output in outputs for value in _prompt_logprobs(output)]
        return Scoring(seconds, sum(map(len, prompts)), sum(values) / len(values))

    def _streamed(self, recorder: Recorder, request: GenerateRequest) -> list[int]:
        ids: list[int] = []
        recorder.sent("only")
        for item in self._engine.stream(request):
            if isinstance(item, GenerateOutput):
                return list(item.completions[0].token_ids)
            recorder.tokens("only", len(item.token_ids), first=not ids)
            ids.extend(item.token_ids)
        raise RuntimeError("the stream ended without its final output")

    def _submitted(self, requests: list[GenerateRequest], concurrency: int) -> list[list[int]]:
        waiting: Iterator[GenerateRequest] = iter(requests)
        futures: list[Future[GenerateOutput]] = []
        running: set[Future[GenerateOutput]] = set()
        for request in waiting:
            future = self._engine.submit(request)
            futures.append(future)
            running.add(future)
            if len(running) >= concurrency:
                _, running = wait(running, return_when=FIRST_COMPLETED)
        return [list(future.result().completions[0].token_ids) for future in futures]


def _prompt_logprobs(output: GenerateOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    return [value for value in output.prompt_logprobs.values if value is not None]


if __name__ == "__main__":
    serve(Phalanx)
