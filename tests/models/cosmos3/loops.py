"""The stored loops as rows of a service, and the hand that drives a service through its ticks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.engine_config import DeviceConfig, EngineConfig, use_engine_config
from phalanx.layers.unipc import FlowSchedule, SchedulerConfig
from phalanx.models.cosmos3.args import Cosmos3PolicyArgs
from phalanx.models.cosmos3.building import LoadedCosmos3, build_service, load_model
from phalanx.models.cosmos3.guidance import AWAY, TOWARDS, Guidance
from phalanx.models.cosmos3.media import MediaRow
from phalanx.models.cosmos3.row import ACTIONS, SOUND, VISION, MediaRequest, RowInputs
from phalanx.schema.events import Delta, Failed, Final, Scheduled
from tests.models.cosmos3.loop_shapes import SHAPES
from tests.models.cosmos3.stored import document, tensors

TOLERANCE = 2e-4
FLOAT32 = EngineConfig(DeviceConfig("cpu", "float32"))
LOOPS = tuple(SHAPES)
BRANCHES = {"cond": TOWARDS, "uncond": AWAY}
"""The fixtures' names of branches and ours."""
MODALITIES = {"vision": VISION, "sound": SOUND, "action": ACTIONS}
DOMAIN, RAW_ACTION_DIM = 8, 10


@dataclass(frozen=True)
class Loop:
    """One stored loop: what went in, and what diffusers computed at every step."""

    name: str

    @property
    def io(self) -> Mapping[str, Tensor]:
        return tensors(f"{self.name}/io")

    @property
    def case(self) -> dict[str, Any]:
        return document("meta")["cases"][self.name.removeprefix("loop_")]

    @property
    def num_steps(self) -> int:
        return self.case["steps"]

    def schedule(self, **changes: Any) -> FlowSchedule:  # noqa: ANN401
        stored = {**document("scheduler"), **self.case["scheduler"], **changes}
        return FlowSchedule.of(SchedulerConfig.from_json(stored), self.num_steps)

    def inputs(self, **changes: Any) -> RowInputs:  # noqa: ANN401
        """Of a row; noise has what is known mixed in already."""
        io, shape = self.io, SHAPES[self.name]
        scale = self.case["call"]["guidance_scale"]
        actions = io.get("noise.action")
        noise = MediaRow(shape, 0, io["noise.vision"][0], io.get("noise.sound"), actions, DOMAIN)
        made = RowInputs(
            prompt=tuple(io["cond_ids"].tolist()),
            negative=tuple(io["uncond_ids"].tolist()) if scale != 1 else None,
            shape=shape,
            schedule=self.schedule(),
            guidance=Guidance(scale),
            noise=noise,
            raw_action_dim=0 if actions is None else RAW_ACTION_DIM,
            known=noise.vision,
            known_actions=actions,
        )
        return replace(made, **changes)

    def stored(self, step: int, what: str, modality: str) -> Tensor | None:
        """`what` of a step, as we lay it out."""
        found = self.io.get(f"step{step}.{what}.{modality}")
        return found[0] if found is not None and modality == "vision" else found


def model_of(directory: Path, config: EngineConfig = FLOAT32, **options: Any) -> LoadedCosmos3:  # noqa: ANN401
    with use_engine_config(config):
        return load_model(args_of(directory, **options))


def args_of(directory: Path, **options: Any) -> Cosmos3PolicyArgs:  # noqa: ANN401
    given = {"max_tokens": 64, "max_text_tokens": 64, "native_operators": "off", **options}
    return Cosmos3PolicyArgs(directory, **given)


class Drive:
    """A service of its own for rows, and what came of them."""

    def __init__(
        self,
        model: LoadedCosmos3,
        config: EngineConfig = FLOAT32,
        answer=lambda row: row,
        **options: Any,  # noqa: ANN401
    ) -> None:
        options.setdefault("max_batch_size", 4)
        with use_engine_config(config):
            self.service = build_service(model, args_of(Path("unused"), **options), answer)
        self.num_branches = model.branches.num_branches
        self.deltas: dict[str, list[Any]] = {}
        self.ended: dict[str, Final | Failed] = {}
        self.batches: list[int] = []

    @property
    def nodes(self):
        """The nodes by name."""
        nodes = self.service._engine._nodes
        return {name: node.submodule for name, node in nodes.items()}

    def start(
        self, rid: str, inputs: RowInputs, make: type[MediaRequest] = MediaRequest, **options: Any
    ) -> MediaRequest:
        row = make(inputs, self.num_branches, **options)
        self.deltas[rid] = []
        self.service.start_row(rid, row)
        return row

    def tick(self) -> None:
        for event in self.service.tick():
            assert event.rid not in self.ended, f"{event} after the end"
            match event:
                case Scheduled():
                    pass
                case Delta(rid, payload):
                    self.deltas[rid].append(payload)
                case _:
                    self.ended[event.rid] = event
        self.batches.append(self.service.statistics().last_batch_size)

    def finish(self) -> None:
        """Tick until nothing is left, and check that nothing is."""
        while self.service.busy:
            self.tick()
        assert self.ended.keys() == self.deltas.keys()
        assert self.service._engine.at_rest()

    def run(self, *inputs: RowInputs, **options: Any) -> list[MediaRequest]:  # noqa: ANN401
        """Rows that started together, when they have ended."""
        first = len(self.deltas)
        rows = [self.start(f"row {first + at}", one, **options) for at, one in enumerate(inputs)]
        self.finish()
        for rid in self.deltas:
            assert isinstance(self.ended[rid], Final), self.ended[rid]
        return rows


def errors(loop: Loop, row: MediaRequest) -> dict[str, float]:
    """The largest error of everything that is stored of a loop, by step and name."""
    found: dict[str, float] = {}
    assert len(row.trace) == loop.num_steps
    for step, trace in enumerate(row.trace):
        for theirs, ours in MODALITIES.items():
            names = {"velocity": f"velocity.{ours}", "latents": ours}
            names |= {branch: f"{label}.{ours}" for branch, label in BRANCHES.items()}
            for what, name in names.items():
                stored = loop.stored(step, what, theirs)
                if stored is None:
                    continue
                found[f"step{step}.{what}.{theirs}"] = largest(trace[name] - stored)
    return found


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def final(row: MediaRequest) -> dict[str, Tensor]:
    """The last latents by modality."""
    media = row.latents
    parts = {VISION: media.vision, SOUND: media.sound, ACTIONS: media.actions}
    return {name: part for name, part in parts.items() if part is not None}


def same(first: MediaRequest, second: MediaRequest, tolerance: float = 2e-5) -> None:
    """Two rows came to the same latents."""
    ours, theirs = final(first), final(second)
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        torch.testing.assert_close(part, theirs[name], rtol=0, atol=tolerance)
