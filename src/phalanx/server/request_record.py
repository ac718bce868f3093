"""One accepted request in the server's books: listed while it lives, counted once when it ends."""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.schema.generate import Abort, FinishReason
from phalanx.server.live import LiveRequests
from phalanx.server.metrics import Outcome, ServerMetrics


class RequestRecord:
    """Made when the engine has taken the request."""

    def __init__(
        self,
        rid: str,
        num_prompt_tokens: int,
        live: LiveRequests,
        metrics: ServerMetrics,
        clock: Clock,
    ) -> None:
        self.rid = rid
        self.metrics = metrics
        self._live = live
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._ended = False
        live.add(rid)
        metrics.accepted(num_prompt_tokens)

    @property
    def elapsed_s(self) -> float:
        """Since the engine took it."""
        return self._clock.monotonic_s() - self._started_s

    def end(self, outcome: Outcome) -> None:
        """It ended; only the first call counts."""
        if not self._ended:
            self._ended = True
            self._live.discard(self.rid)
            self.metrics.ended(outcome, self.elapsed_s)


def outcome_of(reasons: list[FinishReason]) -> Outcome:
    """`aborted` where any completion was."""
    aborted = any(isinstance(reason, Abort) for reason in reasons)
    return Outcome.ABORTED if aborted else Outcome.COMPLETED
