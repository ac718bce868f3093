"""A loaded policy and its loop: a request of several rows is as many rows of the loop, which end
together, as one event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.loop.model_memory import ModelMemory
from phalanx.loop.service import LoopService
from phalanx.loop.step_loop import StepLoop
from phalanx.models.pi.request import PiRequest
from phalanx.models.pi.rollout import PI05RolloutOutput, RowOutcome, gathered
from phalanx.models.pi.row import PolicyRow, RowInputs
from phalanx.models.pi.row_maker import RowMaker
from phalanx.models.pi.weight_store import PolicyWeights
from phalanx.schema.control import ControlOp, ReplaceWeights
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.limits import Limits
from phalanx.step.engine import StepEngine


@dataclass
class _Group:
    """The rows of one request that have not all ended."""

    children: tuple[str, ...]
    actions: dict[str, Tensor | RowOutcome] = field(default_factory=dict)
    scheduled: bool = False
    cancelled: bool = False


class PolicyService(LoopService):
    """See the module. Called by one thread."""

    kind = "a pi policy"
    instead = "its weights come by ReplaceWeights, or POST /update_weights_from_tensor"

    def __init__(
        self,
        engine: StepEngine,
        loop: StepLoop,
        memory: ModelMemory,
        weights: PolicyWeights,
        rows: RowMaker,
        image_tokens: int,
        limits: Limits,
    ) -> None:
        super().__init__(engine, loop, memory, limits)
        self.weights = weights
        self._rows = rows
        self._image_tokens = image_tokens
        self._groups: dict[str, _Group] = {}
        self._parents: dict[str, str] = {}
        self._dropped: set[str] = set()
        """Rows of a failed request whose events of the running tick nobody wants."""

    def start(self, rid: str, request: PiRequest, state: Tensor | None = None) -> None:
        """Queue a request; `state` (B, size) where the expert reads one."""
        self._start(rid, self._rows.make(request, state))

    def start_rollout(
        self,
        rid: str,
        request: PiRequest,
        sigmas: Tensor,
        step_noise: Tensor | None,
        *,
        with_values: bool,
    ) -> None:
        """Queue a rollout: a deviation for each step (B, steps), and noise (B, steps, chunk, size)."""
        rows = self._rows.make_rollout(request, sigmas, step_noise, with_values=with_values)
        self._start(rid, rows)

    def _start(self, rid: str, rows: list[RowInputs]) -> None:
        # A single row too: else another request might have the name of one of several rows.
        children = tuple(f"{rid}#{at}" for at in range(len(rows)))
        self._groups[rid] = _Group(children)
        self._parents.update(dict.fromkeys(children, rid))
        for child, inputs in zip(children, rows, strict=True):
            self.begin(child, PolicyRow(inputs, self._image_tokens))

    def cancel(self, rid: str) -> None:
        group = self._groups.get(rid)
        for child in () if group is None else group.children:
            self._loop.cancel(child)

    def tick(self) -> list[Event]:
        events: list[Event] = []
        for event in self._loop.tick():
            if event.rid not in self._dropped:
                events.extend(self._of_group(self._parents[event.rid], event))
        self._dropped.clear()
        return events

    def operate(self, op: ControlOp, *, at_rest: bool) -> bool:
        if not isinstance(op, ReplaceWeights):
            return super().operate(op, at_rest=at_rest)
        self._memory.expect_weights()
        for name, tensor in op.tensors.items():
            self.weights.check_weight(name, tensor)
        with self._memory.coming(tensor.nbytes for tensor in op.tensors.values()):
            self._loop.push_back_all()
            self.weights.replace(op.tensors)
        self._memory.warm_up()
        return True

    def _of_group(self, rid: str, event: Event) -> list[Event]:
        """A row's event as its request's: one `Scheduled`, one end when all rows have ended."""
        group = self._groups[rid]
        match event:
            case Scheduled():
                first, group.scheduled = not group.scheduled, True
                return [Scheduled(rid)] if first else []
            case Delta():
                raise AssertionError("a policy answers with whole chunks")
            case Final(child, payload, cancelled):
                group.actions[child] = payload
                group.cancelled |= cancelled
                if len(group.actions) < len(group.children):
                    return []
                self._forget(rid, group)
                ended = [group.actions[child] for child in group.children]
                return [Final(rid, _combined(ended), cancelled=group.cancelled)]
            case Failed(child, error):
                self._forget(rid, group)
                for other in group.children:
                    if other != child:
                        self._loop.drop(other)
                        self._dropped.add(other)
                return [Failed(rid, error)]

    def _forget(self, rid: str, group: _Group) -> None:
        del self._groups[rid]
        for child in group.children:
            self._parents.pop(child)


def _combined(rows: Sequence[Tensor | RowOutcome]) -> Tensor | PI05RolloutOutput:
    """The rows' outputs as their request's. Of a rollout that was cancelled only actions are left."""
    outcomes = [row for row in rows if isinstance(row, RowOutcome)]
    if len(outcomes) == len(rows):
        return gathered(outcomes)
    return torch.stack([row.chain[-1] if isinstance(row, RowOutcome) else row for row in rows])
