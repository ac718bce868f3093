"""A loaded Cosmos3 and its loop: what the entries hand their calls to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.loop.model_memory import ModelMemory
from phalanx.loop.service import LoopService
from phalanx.loop.step_loop import StepLoop
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.request import Cosmos3ActionRequest, Cosmos3T2VRequest
from phalanx.models.cosmos3.row import KV, MediaRequest
from phalanx.models.cosmos3.row_maker import RowMaker
from phalanx.models.cosmos3.text_node import TextNode
from phalanx.schema.events import Event, Failed, Final
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics
from phalanx.step.engine import StepEngine
from phalanx.step.resources.kv_cache import KVCache

logger = logging.getLogger(__name__)

Answer = Callable[[MediaRequest], Any]


@dataclass(frozen=True)
class ServiceParts:
    """What computes a service's requests. `num_branches`: how many of guidance one rank computes."""

    engine: StepEngine
    loop: StepLoop
    memory: ModelMemory
    rows: RowMaker
    text: TextNode
    lockstep: Lockstep
    num_branches: int


class Cosmos3Service(LoopService):
    """See the module. Called by one thread."""

    kind = "Cosmos3"

    def __init__(self, parts: ServiceParts, answer: Answer, limits: Limits) -> None:
        super().__init__(parts.engine, parts.loop, parts.memory, limits)
        self._parts = parts
        self._answer = answer
        self._warned = False

    def start(self, rid: str, request: Cosmos3T2VRequest | Cosmos3ActionRequest) -> None:
        """Queue a request that was found valid."""
        parts = self._parts
        self.start_row(rid, MediaRequest(parts.rows.make(request), parts.num_branches))

    def start_row(self, rid: str, row: MediaRequest) -> None:
        """Queue what has been made of a request already."""
        if self._parts.num_branches == 1 and not (row.inputs.guidance.guides or self._warned):
            self._warned = True
            logger.warning(
                "request %r is not guided (guidance_scale=1): with outer.cfg_size=2 half of the ranks "
                "have nothing to compute of such requests; this is said once",
                rid,
            )
        self.begin(rid, row)

    def tick(self) -> list[Event]:
        """Run one step. Raises `PhalanxDistError` where this rank cannot go on with the others."""
        lockstep = self._parts.lockstep
        events = [self._answered(event) for event in self._loop.tick()]
        for event in events:
            if isinstance(event, Failed):
                lockstep.note(event.error)
        lockstep.check()
        return events

    def statistics(self) -> LoopStatistics:
        text, cache = self._parts.text, self._engine.resource(KV)
        assert isinstance(cache, KVCache)
        return msgspec.structs.replace(
            super().statistics(),
            num_prompt_tokens=text.num_read,
            num_cached_tokens=text.num_found,
            pool_used_tokens=cache.used_tokens,
            pool_cached_tokens=cache.cached_tokens,
        )

    def _answered(self, event: Event) -> Event:
        """The end of a row as its request's."""
        if not isinstance(event, Final):
            return event
        return Final(event.rid, self._answer(event.payload), cancelled=event.cancelled)
