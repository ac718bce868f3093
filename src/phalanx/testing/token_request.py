"""A request for the toy nodes: a prompt, how many tokens to produce, and what should go wrong."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.loop.request import Work
from phalanx.step.outputs import HostRow
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.sampler import SamplerConfig

NODE = "toy"
WALK = "generate"


class Stage(enum.Enum):
    """Where a fault can strike: in the node, in a probe resource, or in the request's own state."""

    PREPARE = "prepare_inputs"
    DECLARE = "declare_step"
    ADMIT = "admit"
    PLAN = "plan"
    PREPROCESS = "preprocess"
    FORWARD = "forward"
    COMMIT = "commit"
    POSTPROCESS = "postprocess"
    CHECK_STOP = "check_stop"
    PUBLISH = "publish"
    NEXT_WORK = "next_work"
    CONFIGS = "resource_configs"
    ADVANCE = "advance"
    PUSH_BACK = "push_back"
    TAKE_DELTA = "take_delta"
    OUTPUT = "output"


class InjectedError(RuntimeError):
    """What a fault raises."""


@dataclass(frozen=True)
class StepFault:
    """Raise at `stage` once the request has produced `after` tokens."""

    stage: Stage
    after: int = 0


class TokenRequest:
    """A `RequestState` that ends after `count` tokens; its output is the tuple of them.

    `skips` steps leave the request out before its first one. `indivisible` work is never cut into
    chunks. `sampler` is for nodes that sample. `place` is (node, walk). `numbers` keeps every other output a node gives.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        count: int,
        *,
        fault: StepFault | None = None,
        sampler: SamplerConfig | None = None,
        skips: int = 0,
        indivisible: bool = False,
        place: tuple[str, str] = (NODE, WALK),
    ) -> None:
        self.prompt = prompt
        self.count = count
        self.outputs: list[int] = []
        self.numbers: list[HostRow] = []
        self.computed = 0
        self.num_push_backs = 0
        self.num_adopted = 0
        self._fault = fault
        self._sampler = sampler
        self._skips_left = skips
        self._divisible = not indivisible
        self._place = place
        self._num_reported = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def strike(self, stage: Stage) -> None:
        """Raise if the request's fault is due at this stage."""
        fault = self._fault
        if fault is not None and fault.stage is stage and len(self.outputs) >= fault.after:
            raise InjectedError(stage.value)

    def skip(self) -> bool:
        """Whether the request wants to be left out of this step."""
        skipping = self._skips_left > 0
        self._skips_left -= skipping
        return skipping

    def tokens(self, span: int) -> list[int]:
        """The next `span` tokens to compute."""
        return [*self.prompt, *self.outputs][self.computed : self.computed + span]

    def gives_token(self, span: int) -> bool:
        """Whether a step of `span` tokens reaches the end and so gives a new one."""
        return self.computed + span == self.num_tokens

    def accept(self, outputs: HostRow) -> None:
        """Take a step's values."""
        if "token" in outputs:
            self.outputs.append(outputs["token"])
            self.numbers.append({name: outputs[name] for name in outputs if name != "token"})

    def next_work(self) -> Work | None:
        self.strike(Stage.NEXT_WORK)
        if len(self.outputs) >= self.count:
            return None
        total = self.num_tokens
        return Work(*self._place, total - self.computed, total, self._divisible)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        self.strike(Stage.CONFIGS)
        if self._sampler is None:
            return {}
        given = replace(self._sampler, prompt_ids=self.prompt, output_ids=tuple(self.outputs))
        return {"sampler": given}

    def advance(self, span: int) -> None:
        self.strike(Stage.ADVANCE)
        self.computed += span

    def adopt(self, num_tokens: int) -> None:
        self.computed += num_tokens
        self.num_adopted += num_tokens

    def push_back(self) -> None:
        self.strike(Stage.PUSH_BACK)
        self.computed = 0
        self.num_push_backs += 1

    def take_delta(self) -> tuple[int, ...] | None:
        self.strike(Stage.TAKE_DELTA)
        new = tuple(self.outputs[self._num_reported :])
        self._num_reported = len(self.outputs)
        return new or None

    def output(self, *, cancelled: bool) -> tuple[int, ...]:
        self.strike(Stage.OUTPUT)
        return tuple(self.outputs)
