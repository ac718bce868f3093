"""All operations of one server, which share one notion of when nothing runs."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.engine.engine import Engine
from phalanx.server.lifecycle import Lifecycle
from phalanx.server.live import LiveRequests
from phalanx.server.operations.generation import GenerationOperations
from phalanx.server.operations.memory import MemoryOperations
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings
from phalanx.server.operations.weights import WeightOperations


@dataclass(frozen=True)
class Operations:
    """What the routes of every dialect call."""

    generation: GenerationOperations
    memory: MemoryOperations
    weights: WeightOperations


def create_operations(
    engine: Engine, live: LiveRequests, lifecycle: Lifecycle, *, takes_weights: bool
) -> Operations:
    """Those on `engine`, whose requests are `live`."""
    quiescence, undertakings = Quiescence(lifecycle), Undertakings()
    return Operations(
        GenerationOperations(engine, live, lifecycle, quiescence, undertakings),
        MemoryOperations(engine, quiescence, undertakings),
        WeightOperations(engine, live, quiescence, undertakings, dynamic=takes_weights),
    )
