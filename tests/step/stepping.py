"""Drives a step engine by hand: requests of the toy nodes, one step at a time."""

from __future__ import annotations

from phalanx.step.batch import ExecutingBatch
from phalanx.step.engine import StepEngine
from phalanx.testing.token_request import NODE, WALK, StepFault, TokenRequest


class Stepping:
    """What a loop does, without one: nobody is ended or pushed back."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.states: dict[str, TokenRequest] = {}

    def open(
        self,
        rid: str,
        prompt: tuple[int, ...],
        count: int = 3,
        fault: StepFault | None = None,
        skips: int = 0,
    ) -> TokenRequest:
        state = self.states[rid] = TokenRequest(prompt, count, fault=fault, skips=skips)
        self.engine.add_request(rid, state, {})
        return state

    def batch(self, **spans: int) -> ExecutingBatch:
        """A batch of these rows; a span of 0 stands for all that is left."""
        rows = [
            self.engine.row(rid, span or self.states[rid].num_tokens - self.states[rid].computed)
            for rid, span in spans.items()
        ]
        return ExecutingBatch(NODE, WALK, rows)

    def step(self, **spans: int) -> ExecutingBatch:
        """One whole step."""
        batch = self.batch(**spans)
        self.engine.prepare_inputs(batch)
        self.engine.exec(batch)
        if batch.admit_error is None:
            self.engine.postprocess(batch)
        self.engine.finalize(batch)
        if batch.admit_error is None:
            for row in batch.live_rows():
                self.states[row.request_id].advance(row.span)
            self.engine.check_stop(batch)
        return batch

    def finish(self, *rids: str) -> dict[str, str]:
        """Step until all have their tokens or have failed; the failures by request."""
        failed: dict[str, str] = {}
        live = list(rids)
        while live:
            batch = self.step(**dict.fromkeys(live, 0))
            assert batch.admit_error is None
            for rid, error in batch.failed_requests.items():
                failed[rid] = f"{type(error).__name__}: {error}"
                self.engine.remove_request(rid)
                live.remove(rid)
            live = [rid for rid in live if len(self.states[rid].outputs) < self.states[rid].count]
        return failed

    def close(self) -> None:
        """Remove everybody; then the engine must be as at the start."""
        for rid in self.states:
            self.engine.remove_request(rid)
        assert self.engine.at_rest()
