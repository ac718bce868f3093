"""An engine that is not what its answer says: the server tells that nobody knows."""

import asyncio

import pytest

from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.schema.control import ALL_TAGS, MemoryTag, Sleep, Wake
from phalanx.schema.statistics import EngineMemory
from phalanx.server.dialects import SGLANG, WEIGHTS, Refusals
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.operations.memory import MemoryOperations
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings


class OddEngine:
    """Answers as it is told; its memory stays what it is."""

    def __init__(self, answer: bool, asleep: frozenset[MemoryTag]) -> None:
        self._answer = answer
        self.memory = EngineMemory(asleep=asleep)
        self.ops: list[object] = []

    def control(self, op: object) -> bool:
        self.ops.append(op)
        return self._answer


def operations(engine: OddEngine) -> MemoryOperations:
    return MemoryOperations(engine, Quiescence(Lifecycle(Phase.READY)), Undertakings())


@pytest.mark.parametrize(
    ("answer", "asleep", "error", "words"),
    [
        (True, frozenset({MemoryTag.KV_CACHE}), RequestFailedError, "cuda_graph, weights was"),
        (False, frozenset(), InvalidRequestError, "Nothing has changed"),
    ],
)
def test_release(answer, asleep, error, words):
    engine = OddEngine(answer, asleep)
    with pytest.raises(error, match=words):
        asyncio.run(operations(engine).release(ALL_TAGS))
    assert engine.ops == [Sleep(ALL_TAGS)]


@pytest.mark.parametrize("answer", [True, False])
def test_resume(answer):
    engine = OddEngine(answer, frozenset({MemoryTag.WEIGHTS}))
    with pytest.raises(RequestFailedError, match="not certain that the memory of weights was"):
        asyncio.run(operations(engine).resume(frozenset({MemoryTag.WEIGHTS})))
    assert engine.ops == [Wake(frozenset({MemoryTag.WEIGHTS}))]


def test_a_failure_half_way_is_no_refusal():
    """Whoever reads `success` false may take it that nothing has changed."""
    refusals = Refusals(1)
    failed = refusals.of(RequestFailedError("lost"), WEIGHTS)
    assert (failed.status_code, b"success" in failed.body) == (500, False)
    refused = refusals.of(InvalidRequestError("odd"), WEIGHTS)
    assert (refused.status_code, b'"success":false' in refused.body) == (400, True)
    assert refusals.of(RequestFailedError("lost"), SGLANG).body == failed.body
