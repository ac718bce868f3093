"""A loaded policy and its loop: a request of several rows is as many rows of the loop, which end
together, as one event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from phalanx.layers.real_time_chunking import Schedule, prefix_weights
from phalanx.loop.step_loop import StepLoop
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.request import PiRequest, RealTimeChunking
from phalanx.models.pi.rollout import PI05RolloutOutput, RowOutcome, RowRollout, gathered
from phalanx.models.pi.row import OldChunk, PolicyRow, RowInputs
from phalanx.models.pi.weight_store import PolicyWeights
from phalanx.schema.control import Continue, ControlOp, Flush, Pause, PauseMode, ReplaceWeights
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics
from phalanx.step.engine import StepEngine

DEFAULT_HORIZON = 10
"""The execution horizon of LeRobot's real-time chunking."""


@dataclass
class _Group:
    """The rows of one request that have not all ended."""

    children: tuple[str, ...]
    actions: dict[str, Tensor | RowOutcome] = field(default_factory=dict)
    scheduled: bool = False
    cancelled: bool = False


class PolicyService:
    """See the module. Called by one thread."""

    def __init__(
        self,
        engine: StepEngine,
        loop: StepLoop,
        weights: PolicyWeights,
        model: PiModel,
        limits: Limits,
        generator: torch.Generator,
    ) -> None:
        self.limits = limits
        self.weights = weights
        self.model = model
        self._engine = engine
        self._loop = loop
        self._generator = generator
        self._device = engine.backend.device
        self._groups: dict[str, _Group] = {}
        self._parents: dict[str, str] = {}
        self._dropped: set[str] = set()
        """Rows of a failed request whose events of the running tick nobody wants."""

    @property
    def busy(self) -> bool:
        return self._loop.busy

    def start(self, rid: str, request: PiRequest, state: Tensor | None = None) -> None:
        """Queue a request; `state` (B, size) where the expert reads one."""
        self._start(rid, self._rows(request, state))

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
        rows = self._rows(request, None)
        steps = sigmas.shape[1]
        if step_noise is None:
            noise = self._drawn((len(rows), steps, *rows[0].noise.shape))
        else:
            noise = step_noise.to(self._device, torch.float32)
        drawn = [
            replace(row, num_steps=steps, rollout=RowRollout(noise[at], tuple(own), with_values))
            for at, (row, own) in enumerate(zip(rows, sigmas.tolist(), strict=True))
        ]
        self._start(rid, drawn)

    def _start(self, rid: str, rows: list[RowInputs]) -> None:
        children = tuple(rid if len(rows) == 1 else f"{rid}#{at}" for at in range(len(rows)))
        self._groups[rid] = _Group(children)
        self._parents.update(dict.fromkeys(children, rid))
        for child, inputs in zip(children, rows, strict=True):
            self._loop.start(child, PolicyRow(inputs, self.model.geometry.image_tokens))

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

    def control(self, op: ControlOp) -> bool:
        match op:
            case Pause(mode):
                self._loop.paused = True
                if mode is PauseMode.ABORT:
                    self._loop.cancel_all()
                elif mode is PauseMode.RETRACT:
                    self._loop.push_back_all()
                return True
            case Continue():
                self._loop.paused = False
                return True
            case Flush():
                return self._loop.idle and self._engine.at_rest()
            case ReplaceWeights(tensors):
                self._loop.push_back_all()
                self.weights.replace(tensors)
                return True

    def statistics(self) -> LoopStatistics:
        loop = self._loop
        return LoopStatistics(
            num_running=loop.num_running,
            num_waiting=loop.num_waiting,
            num_steps=loop.num_steps,
            num_retractions=loop.num_push_backs,
            last_batch_size=loop.last_batch_size,
            paused=loop.paused,
            stage_s=self._engine.stage_s(),
        )

    def close(self) -> None:
        self._loop.cancel_all()
        self._loop.close()
        self._engine.shutdown()

    def _rows(self, request: PiRequest, state: Tensor | None) -> list[RowInputs]:
        """Each row's own part, on the device where it is computed with."""
        ids, lens = request.input_ids, request.lang_lens.tolist()
        noise = self._noise(request)
        images = request.pixel_values.to(self._device, torch.float32)
        masks = request.image_masks
        num_steps = request.num_steps or self.model.geometry.num_steps
        rows: list[RowInputs] = []
        for at in range(len(ids)):
            rows.append(
                RowInputs(
                    images=images[at] if masks is None else images[at][masks[at].to(images.device)],
                    token_ids=ids[at, : lens[at]].to(self._device),
                    noise=noise[at],
                    num_steps=num_steps,
                    state=None if state is None else state[at].to(self._device, torch.float32),
                    old_chunk=None if request.rtc is None else self._old_chunk(request.rtc, at),
                )
            )
        return rows

    def _noise(self, request: PiRequest) -> Tensor:
        geometry = self.model.geometry
        if request.noise is not None:
            return request.noise.to(self._device, torch.float32)
        shape = (len(request.input_ids), geometry.chunk_size, geometry.max_action_dim)
        return self._drawn(shape)

    def _drawn(self, shape: tuple[int, ...]) -> Tensor:
        # On the host, so that a seed gives the same actions on every device.
        return torch.randn(shape, generator=self._generator).to(self._device)

    def _old_chunk(self, rtc: RealTimeChunking, row: int) -> OldChunk:
        geometry = self.model.geometry
        left = rtc.prev_chunk_left_over[row]
        actions = torch.zeros(geometry.chunk_size, geometry.max_action_dim)
        actions[: left.shape[0], : left.shape[1]] = left
        horizon = min(rtc.execution_horizon or DEFAULT_HORIZON, len(left))
        if rtc.mode == "guided":
            delay, num_frozen = rtc.inference_delay, 0
            weights = prefix_weights(Schedule(rtc.schedule), delay, horizon, geometry.chunk_size)
        else:
            num_frozen = min(rtc.inference_delay, len(left))
            weights = torch.zeros(geometry.chunk_size)
        return OldChunk(
            actions.to(self._device),
            weights.to(self._device),
            rtc.max_guidance_weight,
            num_frozen,
        )

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
