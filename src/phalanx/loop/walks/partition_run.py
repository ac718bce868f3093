"""One partition of one request: the walk that it is in, and what has persisted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from phalanx.loop.walks.model import FinishedWalk, NextWalk, Values, WalkModel
from phalanx.loop.walks.program import WalkProgram
from phalanx.loop.walks.routes import Input
from phalanx.loop.walks.sections import Edge, Node
from phalanx.loop.walks.walk_run import WalkRun


class PartitionRun:
    """In `walk`, or done."""

    def __init__(self, name: str, program: WalkProgram) -> None:
        self.name = name
        self._program = program
        self._walk: WalkRun | None = None
        self._persisted: dict[str, Values] = {}
        self.ended_streams: set[Input] = set()
        """The streams whose final chunk was taken."""

    @property
    def done(self) -> bool:
        return self._walk is None

    @property
    def walk(self) -> WalkRun:
        assert self._walk is not None, f"partition {self.name!r} is done"
        return self._walk

    @property
    def due(self) -> tuple[Node, ...]:
        """The nodes that may run now, if their streams have a chunk."""
        if self._walk is None:
            return ()
        places = self._walk.graph.routes.places
        return tuple(places[name].node for name in self._walk.due)

    def chunked(self, node: str) -> Sequence[Input]:
        """The inputs of a due node that take chunks of streams."""
        return self.walk.graph.routes.unfed[node]

    def begin(self, begun: NextWalk | None) -> None:
        """Enter a walk, or be done with None."""
        if begun is None:
            self._walk = None
        else:
            self._walk = WalkRun(self._program.walk(self.name, begun.walk), begun)

    def end(
        self, node: str, outputs: Mapping[str, Tensor], stopped: frozenset[str]
    ) -> list[tuple[Edge, Values]]:
        """A node has run: keep what persists; what is for the client and for streams."""
        left = self.walk.end(node, outputs, stopped)
        self._persisted.update({edge.name: values for edge, values in left if edge.persist})
        return left

    def go_on(self, model: WalkModel, request: Any) -> None:  # noqa: ANN401
        """If the walk has ended, ask the model for the next one."""
        walk = self.walk
        if walk.ended:
            finished = FinishedWalk(
                self.name,
                walk.graph.name,
                dict(self._persisted),
                frozenset(walk.stopped),
                frozenset(self.ended_streams),
            )
            self.begin(model.next_walk(request, finished))
