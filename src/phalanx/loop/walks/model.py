"""What the author of a model of several nodes answers beside its nodes: which walk comes next, and
what a client gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phalanx.step.resources.base import ResourceConfig

Values = tuple[Tensor, ...]
"""What an input or a persisted name holds: one tensor, or those that a loop has accumulated."""


@dataclass(frozen=True)
class NextWalk:
    """A walk to begin. `inputs` are exactly those that the walk declares; `iterations` bounds its
    loops by name, below their own bound.
    """

    walk: str
    inputs: Mapping[str, Tensor | Values] = field(default_factory=dict)
    iterations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedWalk:
    """A walk that has ended.

    `tensors` are all that has persisted in its partition so far. `stopped` are the loops that its
    nodes ended before their bound. `ended_streams` are the (node, input) whose final chunk the
    partition has taken.
    """

    partition: str
    walk: str
    tensors: Mapping[str, Values]
    stopped: frozenset[str]
    ended_streams: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Emitted:
    """A value for the client, on its device."""

    name: str
    modality: str
    tensor: Tensor


class WalkModel(ABC):
    """Asked about every request; `request` is the plugin's own. It keeps nothing between calls.

    What a method raises ends the request, and no other.
    """

    @abstractmethod
    def first_walks(self, request: Any) -> Mapping[str, NextWalk]:  # noqa: ANN401
        """The walk that each partition begins with; one without takes no part in the request."""

    @abstractmethod
    def next_walk(self, request: Any, finished: FinishedWalk) -> NextWalk | None:  # noqa: ANN401
        """What the partition does next, or None when it is done."""

    @abstractmethod
    def output(self, request: Any, emitted: Sequence[Emitted], *, cancelled: bool) -> Any:  # noqa: ANN401
        """The complete output, of all that was emitted, in order."""

    def take_delta(self, request: Any, emitted: Sequence[Emitted]) -> Any | None:  # noqa: ANN401
        """A part of the output, of what was emitted since the last one; None for no delta."""
        return None

    def num_tokens(self, request: Any, node: str, inputs: Mapping[str, Values]) -> int:  # noqa: ANN401
        """How many tokens these inputs are for a node: the span of its rows, at least 1."""
        return 1

    def resource_configs(self, request: Any) -> Mapping[str, ResourceConfig]:  # noqa: ANN401
        """Settings for each resource, by key, as the request begins with them."""
        return {}
