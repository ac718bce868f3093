"""Observations and results that LeRobot computed, and policies loaded to compute them again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from phalanx.engine_config import DeviceConfig, EngineConfig, use_engine_config
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.models.pi.building import (
    LoadedPolicy,
    PolicyKind,
    build_engine,
    load_policy,
    nodes_of,
)
from phalanx.models.pi.prefix_nodes import PolicyNode
from phalanx.models.pi.row import PolicyRow, RowInputs
from phalanx.models.pi.row_maker import RowMaker
from phalanx.models.pi0.entry import PI0
from phalanx.models.pi0.main_pi0 import PI0Args, PI0Config, PI0Request
from phalanx.models.pi05.entry import PI05
from phalanx.models.pi05.main_pi05 import PI05Args, PI05Config, PI05Request
from phalanx.schema.events import Failed, Final
from phalanx.step.engine import StepEngine

FIXTURES = Path(__file__).parents[2] / "fixtures" / "policies"
TOLERANCE = 5e-6
HEADS = 3
FLOAT32 = EngineConfig(device=DeviceConfig("cpu", "float32"))


@cache
def stored(name: str) -> Mapping[str, Tensor]:
    return load_file(FIXTURES / name / "io.safetensors")


def checkpoint(name: str) -> Path:
    return FIXTURES / name / "checkpoint"


def pixels(name: str) -> Tensor:
    """(2, 3, 3, S, S): a resized camera, one of the right size, and an empty one."""
    io = stored(name)
    front = io["pre.image0"]
    wrist = io["in.wrist_u8"].permute(0, 3, 1, 2).float() / 255 * 2 - 1
    return torch.stack([front, wrist, torch.full_like(front, -1.0)], dim=1)


def observation(name: str) -> dict[str, Tensor]:
    """Fields that requests of both policies have."""
    io = stored(name)
    return {
        "pixel_values": pixels(name),
        "input_ids": io["pre.tokens"],
        "lang_lens": io["pre.token_mask"].sum(1),
        "noise": io["in.noise"],
        "image_masks": torch.tensor([[True, True, False]] * 2),
    }


def padded_state(name: str) -> Tensor:
    return torch.nn.functional.pad(stored(name)["pre.state"], (0, 24))


def request(name: str, **changed: object) -> PI05Request | PI0Request:
    """Both rows of a fixture, with some fields changed."""
    fields = {**observation(name), **changed}
    if name.startswith("pi05"):
        return PI05Request(**fields)
    fields["pixel_values"] = fields["pixel_values"][:, :2]
    fields["image_masks"] = None
    return PI0Request(**{"state": padded_state(name), **fields})


@contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load(name: str, kind: PolicyKind | None = None, operators: str = "off") -> LoadedPolicy:
    """A fixture's policy, of another `kind` where a test has its own."""
    with use_engine_config(FLOAT32):
        if name.startswith("pi05"):
            config = PI05Config(vision_num_heads=HEADS)
            args = PI05Args(checkpoint(name), config=config, native_operators=operators)
            return load_policy(kind or PI05, args)
        args0 = PI0Args(
            checkpoint(name), config=PI0Config(vision_num_heads=HEADS), native_operators=operators
        )
        return load_policy(kind or PI0, args0)


@cache
def loaded(name: str, operators: str = "off") -> LoadedPolicy:
    """The same, unchanged and shared by tests."""
    return load(name, operators=operators)


@dataclass
class Run:
    """Rows that go through a policy together, in the order of their requests."""

    policy: LoadedPolicy
    engine: StepEngine
    rows: list[PolicyRow]
    loop: StepLoop

    def finish(self) -> list[Tensor]:
        """The actions of each row."""
        outputs: dict[str, Tensor] = {}
        while self.loop.busy:
            for event in self.loop.tick():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Final):
                    outputs[event.rid] = event.payload
        return [outputs[str(at)] for at in range(len(self.rows))]


class TracedRow(PolicyRow):
    """A row that keeps its velocities."""

    def __init__(self, inputs: RowInputs, image_tokens: int) -> None:
        super().__init__(inputs, image_tokens, traced=True)


def run(
    policy: LoadedPolicy,
    *requests: PI05Request | PI0Request,
    nodes: Mapping[str, PolicyNode] | None = None,
    row: type[PolicyRow] = TracedRow,
) -> Run:
    """All rows of these requests at once, by these nodes."""
    maker = RowMaker(policy.model.geometry, policy.backend.device, torch.Generator().manual_seed(0))
    made = [
        inputs
        for one in requests
        for inputs in maker.make(one, one.state if isinstance(one, PI0Request) else None)
    ]
    rows = [row(inputs, policy.model.geometry.image_tokens) for inputs in made]
    engine = build_engine(policy, nodes or nodes_of(policy), len(rows))
    budget = Budget(len(rows) * policy.model.max_tokens, len(rows))
    loop = StepLoop(engine, budget)
    for at, one in enumerate(rows):
        loop.start(str(at), one)
    return Run(policy, engine, rows, loop)


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest error, over what the tolerance is counted in."""
    assert found.shape == expected.shape
    return float(((found - expected).abs() / expected.abs().clamp_min(1.0)).max())


def close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    worst = error_of(found, expected)
    assert worst <= tolerance, f"off by {worst:.2e}; allowed is {tolerance:.0e}"
