"""Transformers: its continuous batching for many requests, plain generation for one at a time."""

from __future__ import annotations

import time
from typing import Any

from worker_protocol import (  # type: ignore[import-not-found]
    Generation,
    Recorder,
    Scoring,
    Start,
    serve,
)

BLOCK_SIZE = 256
STEP_TOKENS = 512
SCORED_AT_ONCE = 4


class Transformers:
    def __init__(self, start: Start) -> None:
        import torch
        import transformers

        torch.set_num_threads(start.threads)
        torch.set_grad_enabled(False)
        self._torch: Any = torch
        self._transformers: Any = transformers
        self._kv_tokens = start.kv_tokens
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            start.model, dtype=getattr(torch, start.dtype), attn_implementation="sdpa"
        )
        self._model: Any = model.eval()

    def describe(self) -> str:
        return f"transformers {self._transformers.__version__}, torch {self._torch.__version__}"

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> Generation:
        config = self._transformers.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        recorder = Recorder()
        if concurrency == 1:
            return recorder.finish([self._alone(recorder, prompt, config) for prompt in prompts])
        batching = self._transformers.ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=-(-self._kv_tokens // BLOCK_SIZE),
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=concurrency,
        )
        outputs = self._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching
        )
        # Ids count up in the order of the prompts.
        ordered = sorted(outputs.values(), key=lambda out: int(out.request_id.split("_")[-1]))
        return recorder.finish([list(out.generated_tokens) for out in ordered])

    def flush(self) -> None:
        """Nothing outlives a call."""

    def close(self) -> None: ...

    def score(self, prompts: list[list[int]]) -> Scoring:
        torch = self._torch
        began = time.perf_counter()
        total, count = 0.0, 0
        for first in range(0, len(prompts), SCORED_AT_ONCE):
            ids = torch.tensor(prompts[first : first + SCORED_AT_ONCE])
            logits = self._model(ids).logits[:, :-1]
            values = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])
            total += float(values.double().sum())
            count += values.numel()
        return Scoring(time.perf_counter() - began, sum(map(len, prompts)), total / count)

    def _alone(self, recorder: Recorder, prompt: list[int], config: object) -> list[int]:
        recorder.sent("only")
        streamer = _TokenTimes(recorder)
        ids = self._torch.tensor([prompt])
        out = self._model.generate(ids, generation_config=config, streamer=streamer)
        return list(out[0, len(prompt) :].tolist())


class _TokenTimes:
    """A streamer: gets the prompt first, then each token."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen = 0

    def put(self, value: object) -> None:
        if self._seen:
            self._recorder.tokens("only", 1, first=self._seen == 1)
        self._seen += 1

    def end(self) -> None: ...


if __name__ == "__main__":
    serve(Transformers)
