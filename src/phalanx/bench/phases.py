"""The phases of the generation benchmark, each run by every system, on prompts of real text."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Mapping
from pathlib import Path

from phalanx.bench.results import Measure, percentile
from phalanx.bench.turns import Asks, Phase
from phalanx.bench.workload import (
    PREFILL_TOKENS,
    SCORED_PROMPTS,
    SCORED_TOKENS,
    SHARED_PREFIX,
    SHARED_TOKENS,
    Workload,
)
from phalanx.errors import ConfigurationError
from phalanx.processing.text import TextTokenizer


class Text:
    """Tokens of a long English text that every Python has, dealt out in order."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = TextTokenizer.from_directory(checkpoint)
        self._chapters = iter(pydoc_data.topics.topics.values())
        self._tokens: list[int] = []

    def take(self, count: int, length: int) -> list[list[int]]:
        """The next `count` prompts of `length` tokens."""
        while len(self._tokens) < count * length:
            chapter = next(self._chapters, None)
            if chapter is None:
                raise ConfigurationError(
                    f"{count} prompts of {length} tokens are more text than the benchmark has; "
                    "ask for fewer or shorter prompts"
                )
            self._tokens += self._tokenizer.encode(chapter)
        taken, self._tokens = self._tokens[: count * length], self._tokens[count * length :]
        return [taken[first : first + length] for first in range(0, len(taken), length)]


class Generate:
    """All prompts with so many in flight; with one in flight also the times of its tokens."""

    def __init__(self, prompts: list[list[int]], new_tokens: int, concurrency: int) -> None:
        self._prompts = prompts
        self._new_tokens = new_tokens
        self.concurrency = concurrency

    @property
    def measures(self) -> tuple[Measure, ...]:
        n = self.concurrency
        speed = Measure(key=f"generate_{n}", label=f"output, {n} in flight", unit="tokens/s")
        work = Measure(key=f"generate_{n}_cpu", label=f"output, {n} in flight", unit="tokens/CPU s")
        if n > 1:
            return speed, work
        return (
            speed,
            work,
            _time("first_token", "time to first token"),
            _time("gap_p50", "between tokens, p50"),
            _time("gap_p99", "between tokens, p99"),
        )

    def warm_up(self, worker: Asks) -> None:
        self._ask(worker, self._prompts[: self.concurrency], min(4, self._new_tokens))

    def run(self, worker: Asks) -> Mapping[str, float]:
        before_s = worker.cpu_s()
        answer = self._ask(worker, self._prompts, self._new_tokens)
        cpu_s = worker.cpu_s() - before_s
        tokens, n = _float(answer["output_tokens"]), self.concurrency
        values = {f"generate_{n}": tokens / _float(answer["seconds"])}
        if cpu_s > 0:
            values[f"generate_{n}_cpu"] = tokens / cpu_s
        first, gaps = _floats(answer["first_s"]), _floats(answer["gaps_s"])
        if n == 1 and first:
            values["first_token"] = percentile(first, 0.5) * 1e3
        if n == 1 and gaps:
            values["gap_p50"] = percentile(gaps, 0.5) * 1e3
            values["gap_p99"] = percentile(gaps, 0.99) * 1e3
        return values

    def _ask(self, worker: Asks, prompts: list[list[int]], new_tokens: int) -> dict[str, object]:
        return worker.ask(
            "generate", prompts=prompts, max_new_tokens=new_tokens, concurrency=self.concurrency
        )


class SharedPrefix:
    """All prompts at once, which begin alike. Each round begins with an empty prefix cache."""

    def __init__(self, prefix: list[int], tails: list[list[int]], new_tokens: int) -> None:
        self._prompts = [[*prefix, *tail] for tail in tails]
        self._new_tokens = new_tokens
        self._label = f"output, {len(tails)} share {len(prefix)}"

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (
            Measure(key="shared_prefix", label=self._label, unit="tokens/s"),
            Measure(key="shared_prefix_cpu", label=self._label, unit="tokens/CPU s"),
        )

    def warm_up(self, worker: Asks) -> None:
        self._ask(worker, min(4, self._new_tokens))

    def run(self, worker: Asks) -> Mapping[str, float]:
        worker.ask("flush")
        before_s = worker.cpu_s()
        answer = self._ask(worker, self._new_tokens)
        cpu_s = worker.cpu_s() - before_s
        tokens = _float(answer["output_tokens"])
        values = {"shared_prefix": tokens / _float(answer["seconds"])}
        if cpu_s > 0:
            values["shared_prefix_cpu"] = tokens / cpu_s
        return values

    def _ask(self, worker: Asks, new_tokens: int) -> dict[str, object]:
        return worker.ask(
            "generate",
            prompts=self._prompts,
            max_new_tokens=new_tokens,
            concurrency=len(self._prompts),
        )


class Prefill:
    """Long prompts, one after another, for a single token each."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    @property
    def measures(self) -> tuple[Measure, ...]:
        length = len(self._prompts[0])
        return (Measure(key="prefill", label=f"prefill of {length}", unit="tokens/s"),)

    def warm_up(self, worker: Asks) -> None:
        self._ask(worker, self._prompts[:1])

    def run(self, worker: Asks) -> Mapping[str, float]:
        answer = self._ask(worker, self._prompts)
        return {"prefill": sum(map(len, self._prompts)) / _float(answer["seconds"])}

    def _ask(self, worker: Asks, prompts: list[list[int]]) -> dict[str, object]:
        return worker.ask("generate", prompts=prompts, max_new_tokens=1, concurrency=1)


class Score:
    """Log-probabilities of prompts."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    @property
    def measures(self) -> tuple[Measure, ...]:
        size = f"{len(self._prompts)} x {len(self._prompts[0])}"
        return (
            Measure(key="score", label=f"scoring, {size}", unit="tokens/s"),
            Measure(key="logprob", label="mean log-probability", unit="nats"),
        )

    def warm_up(self, worker: Asks) -> None:
        worker.ask("score", prompts=self._prompts[:1])

    def run(self, worker: Asks) -> Mapping[str, float]:
        answer = worker.ask("score", prompts=self._prompts)
        speed = _float(answer["tokens"]) / _float(answer["seconds"])
        return {"score": speed, "logprob": _float(answer["mean_logprob"])}


def phases_of(workload: Workload, text: Text) -> tuple[Phase, ...]:
    """The phases of a run, with their prompts; the same for every system and round."""
    prompts = text.take(workload.prompts, workload.prompt_tokens)
    new_tokens, parts = workload.new_tokens, workload.parts
    phases: list[Phase] = []
    if "generate" in parts:
        phases += [Generate(prompts, new_tokens, n) for n in workload.concurrency]
    if "prefill" in parts:
        phases.append(Prefill(text.take(4, PREFILL_TOKENS)))
    if "score" in parts:
        phases.append(Score(text.take(SCORED_PROMPTS, SCORED_TOKENS)))
    if SHARED_PREFIX in parts:
        [prefix] = text.take(1, SHARED_TOKENS)
        phases.append(SharedPrefix(prefix, prompts, new_tokens))
    return tuple(phases)


def _time(key: str, label: str) -> Measure:
    return Measure(key=key, label=label, unit="ms", more_is_better=False)


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _floats(value: object) -> list[float]:
    assert isinstance(value, list)
    return [_float(item) for item in value]
