"""The server's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

import enum
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from phalanx.schema.statistics import EngineStatistics
from phalanx.server.engine_collector import EngineCollector

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Outcome(enum.StrEnum):
    """How a request ended. `disconnected`: its client left before the end."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    REFUSED = "refused"
    OVERLOADED = "overloaded"
    FAILED = "failed"
    DISCONNECTED = "disconnected"


class PolicyStage(enum.StrEnum):
    """Parts of a robot's request: the observation is decoded and prepared, the model computes, the
    actions are finished and encoded."""

    PREPARE = "prepare"
    COMPUTE = "compute"
    FINISH = "finish"


class ServerMetrics:
    """What this server has seen, and at each scrape what its engine says."""

    def __init__(self, statistics: Callable[[], EngineStatistics]) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "phalanx_requests", "Requests by how they ended.", ["outcome"], registry=registry
        )
        self._prompt_tokens = Counter(
            "phalanx_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self._generated_tokens = Counter(
            "phalanx_generated_tokens", "Tokens sent or ready to be sent.", registry=registry
        )
        self._first_token = _histogram(
            "phalanx_time_to_first_token_seconds", "Submit to first token (streams).", registry
        )
        self._e2e = _histogram("phalanx_e2e_latency_seconds", "Submit to end.", registry)
        self._inter_token = _histogram(
            "phalanx_inter_token_latency_seconds",
            "Time between tokens of one completion (streams).",
            registry,
            TOKEN_BUCKETS,
        )
        self._policy_stages = Histogram(
            "phalanx_policy_stage_seconds",
            "Parts of robots' requests; compute has the queue's time in it.",
            ["stage"],
            registry=registry,
            buckets=STAGE_BUCKETS,
        )
        for outcome in Outcome:
            self._requests.labels(outcome)
        registry.register(EngineCollector(statistics))

    def accepted(self, num_prompt_tokens: int) -> None:
        """The engine took a request."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def ended(self, outcome: Outcome, duration_s: float | None = None) -> None:
        """A request ended, `duration_s` after it was accepted."""
        self._requests.labels(outcome).inc()
        if duration_s is not None:
            self._e2e.observe(duration_s)

    def policy_stage(self, stage: PolicyStage, duration_s: float) -> None:
        """A robot's request passed a stage; called from any thread."""
        self._policy_stages.labels(stage).observe(duration_s)

    def generated(self, num_tokens: int) -> None:
        """Tokens came out of the engine."""
        self._generated_tokens.inc(num_tokens)

    def first_token(self, duration_s: float) -> None:
        """A stream's first token came."""
        self._first_token.observe(duration_s)

    def further_tokens(self, num_tokens: int, gap_s: float) -> None:
        """A completion gained tokens, `gap_s` after its previous ones."""
        self._inter_token.observe(gap_s / num_tokens)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)


def _histogram(
    name: str,
    text: str,
    registry: CollectorRegistry,
    buckets: tuple[float, ...] = LATENCY_BUCKETS,
) -> Histogram:
    return Histogram(name, text, registry=registry, buckets=buckets)
