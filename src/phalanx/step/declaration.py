"""What a node declares about a step before anything is reserved or computed.

The ordered segments are the layout authority of every per-token array of the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.step.lease import SlotLease

DEFAULT_LABEL = "main"


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One row's addition of `span` tokens to a stream; span 0 reads without extending."""

    request_id: str
    span: int
    label: str = DEFAULT_LABEL


class Fork(msgspec.Struct, frozen=True, gc=False):
    """Copy stream `source` of a request to `target`; later steps on either leave the other alone."""

    request_id: str
    source: str
    target: str


class ResourceStep:
    """Base of what a node declares for one resource; the resource defines its own subclass."""


@dataclass(frozen=True)
class SubmoduleStep:
    """One step of one node: its rows, and what it asks of each resource (by key).

    `key` must be what the node answers to `capture_key` for these rows. `receivers` names, for
    outputs of a captured forward that not every row gets, the requests that do.
    """

    segments: tuple[Segment, ...]
    resources: Mapping[str, ResourceStep]
    key: Hashable = None
    receivers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class StepContext:
    """The engine's own record of a step while it runs.

    `plan_results` holds each resource's plan for those that depend on it; `reservations` what each
    resource took in `admit`, so that `unadmit` can give exactly that back. Under a `lease` plans go
    into the static buffers of its slot, padded to its bucket.
    """

    request_ids: tuple[str, ...]
    walk: str
    lease: SlotLease | None = None
    plan_results: dict[str, Any] = field(default_factory=dict)
    reservations: dict[str, Any] = field(default_factory=dict)
