"""Requests that do not go on as they foresee: a loop that looks ahead computes for nothing."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.testing.step_models import expected_tokens
from phalanx.testing.token_request import NODE, TokenRequest
from tests.loop.ledger import Bench


class StoppingRequest(TokenRequest):
    """Ends with the first token that 3 divides, where that comes before its `count`."""

    def next_work(self):
        if self.outputs and self.outputs[-1] % 3 == 0:
            return None
        return super().next_work()


class WanderingRequest(TokenRequest):
    """Goes to walk `elsewhere` after a token that 3 divides, and back after the next."""

    def next_work(self):
        work = super().next_work()
        if work is None or not self.outputs or self.outputs[-1] % 3:
            return work
        return replace(work, node=NODE, walk="elsewhere")


def due_tokens(state: TokenRequest) -> tuple[int, ...]:
    """What a request gives when nothing goes wrong."""
    tokens = expected_tokens(state.prompt, state.count)
    if isinstance(state, StoppingRequest):
        for index, token in enumerate(tokens, 1):
            if token % 3 == 0:
                return tokens[:index]
    return tokens


def check_outputs(bench: Bench) -> None:
    for rid, state in bench.states.items():
        assert bench.output(rid) == due_tokens(state)
