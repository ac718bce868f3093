"""All operations of one server, which share one notion of when nothing runs."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.engine.engine import Engine
from phalanx.schema.server_config import ServerConfig
from phalanx.server.lifecycle import Lifecycle
from phalanx.server.live import LiveRequests
from phalanx.server.operations.generation import GenerationOperations
from phalanx.server.operations.memory import MemoryOperations
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings
from phalanx.server.operations.update_session import UpdateSession
from phalanx.server.operations.weights import WeightOperations


@dataclass(frozen=True)
class Operations:
    """What the routes of every dialect call."""

    generation: GenerationOperations
    memory: MemoryOperations
    weights: WeightOperations


def create_operations(
    engine: Engine, live: LiveRequests, lifecycle: Lifecycle, config: ServerConfig
) -> Operations:
    """Those on `engine`, whose requests are `live`."""
    quiescence, undertakings = Quiescence(lifecycle), Undertakings()
    session = UpdateSession(quiescence, lifecycle, config.weight_update_timeout_s)
    return Operations(
        GenerationOperations(engine, live, lifecycle, quiescence, undertakings),
        MemoryOperations(engine, quiescence, undertakings),
        WeightOperations(
            engine, live, quiescence, session, undertakings, dynamic=config.takes_weights
        ),
    )
