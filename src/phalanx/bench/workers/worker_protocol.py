"""What every benchmarked language model's process is asked, and what it answers."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Protocol

from command_loop import Message, answer_commands  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Start:
    """What to load. `kv_tokens`: KV cache over all requests; `max_length`: of one request."""

    model: str
    dtype: str
    threads: int
    kv_tokens: int
    max_length: int
    max_concurrency: int
    options: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """`first_s`: each request's time to its first token from when it was sent; `gaps_s`: times
    between tokens of a request; both in seconds, as `seconds`, the whole call."""

    seconds: float
    output_tokens: int
    first_s: list[float]
    gaps_s: list[float]
    output_ids: list[list[int]]


@dataclass(frozen=True)
class Scoring:
    """`mean_logprob` over all prompt tokens but each prompt's first."""

    seconds: float
    tokens: int
    mean_logprob: float


class System(Protocol):
    """One system under measurement, loaded and warm."""

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, concurrency: int
    ) -> Generation:
        """Greedy, ignoring end tokens, with `concurrency` requests in flight."""
        ...

    def score(self, prompts: list[list[int]]) -> Scoring: ...

    def flush(self) -> None:
        """Forget what is cached of prompts."""
        ...

    def describe(self) -> str:
        """Version and what matters of how it runs."""
        ...

    def close(self) -> None: ...


class Loader(Protocol):
    def __call__(self, start: Start) -> System: ...


class Recorder:
    """Collects token times of requests by key, for systems that report token by token."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._last: dict[str, float] = {}
        self._first_s: list[float] = []
        self._gaps_s: list[float] = []

    def sent(self, key: str) -> None:
        self._last[key] = time.perf_counter()

    def tokens(self, key: str, count: int, *, first: bool) -> None:
        """`count` tokens came together; the gap before them counts once and the others are 0."""
        now = time.perf_counter()
        (self._first_s if first else self._gaps_s).append(now - self._last[key])
        self._gaps_s.extend([0.0] * (count - 1))
        self._last[key] = now

    def finish(self, output_ids: list[list[int]]) -> Generation:
        return Generation(
            time.perf_counter() - self._began,
            sum(map(len, output_ids)),
            self._first_s,
            self._gaps_s,
            output_ids,
        )


def serve(load: Loader) -> None:
    """Answer commands from standard input until it ends."""

    def start(message: Message) -> System:
        return load(Start(**message))

    def generate(system: System, message: Message) -> Message:
        return asdict(system.generate(**message))

    def score(system: System, message: Message) -> Message:
        return asdict(system.score(**message))

    def flush(system: System, message: Message) -> Message:
        system.flush()
        return {}

    answer_commands(start, {"generate": generate, "score": score, "flush": flush})
