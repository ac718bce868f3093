"""A request for the toy nodes: a prompt, how many tokens to produce, and what should go wrong."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.loop.outlook import Foreseeing, Outlook
from phalanx.loop.request import Work
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.kv_step import KVRequestConfig
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
    COLLECT = "collect"
    POSTPROCESS = "postprocess"
    CHECK_STOP = "check_stop"
    PUBLISH = "publish"
    NEXT_WORK = "next_work"
    CONFIGS = "resource_configs"
    ADVANCE = "advance"
    WORK_AFTER = "work_after"
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


@dataclass(frozen=True)
class RowTokens:
    """What a step takes of a request before it is computed: its token ids, none where the only one
    is the one that the step before gives (`pending`) until that is `given` as a tensor, int64 [1].

    `gives`: the step reaches the end of what is known, so it gives a token. `num_outputs`: tokens
    produced before the step.
    """

    request: TokenRequest
    ids: tuple[int, ...]
    gives: bool
    num_outputs: int
    pending: bool = False
    given: Tensor | None = None

    def tensor(self) -> Tensor:
        """The row's token ids, int64."""
        return torch.tensor(self.ids, dtype=torch.int64) if self.given is None else self.given

    def strike(self, stage: Stage) -> None:
        self.request.strike(stage, self.num_outputs)

    def due(self, stage: Stage) -> bool:
        return self.request.due(stage, self.num_outputs)

    @classmethod
    def threaded(
        cls, rids: Sequence[str], rows: Sequence[RowTokens], before: Sequence[NodeOutputs]
    ) -> list[RowTokens | None]:
        """The rows again, pending ones with the column `token` of the step before; None for those
        that it gave no token.
        """
        columns = [part.columns["token"] for part in before if "token" in part.columns]
        found = {
            rid: column.values[index : index + 1]
            for column in columns
            for index, rid in enumerate(column.request_ids)
        }
        threaded: list[RowTokens | None] = []
        for rid, row in zip(rids, rows, strict=True):
            given = found.get(rid) if row.pending else None
            threaded.append(None if row.pending and given is None else replace(row, given=given))
        return threaded


class TokenRequest(Foreseeing):
    """A `RequestState` that ends after `count` tokens; its output is the tuple of them.

    `skips` steps leave the request out before its first one. `indivisible` work is never cut into
    chunks. It takes over what the cache knows of its tokens, and leaves its own there. `sampler` is
    for nodes that sample. `place` is (node, walk). `numbers` keeps every other output a node gives.
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
        self._tokens = [*prompt]
        self._place = place
        self._num_reported = 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def strike(self, stage: Stage, num_outputs: int | None = None) -> None:
        """Raise if the request's fault is due at this stage, after that many outputs or all."""
        if self.due(stage, len(self.outputs) if num_outputs is None else num_outputs):
            raise InjectedError(stage.value)

    def due(self, stage: Stage, num_outputs: int) -> bool:
        """Whether the request's fault strikes at this stage, after that many outputs."""
        fault = self._fault
        return fault is not None and fault.stage is stage and num_outputs >= fault.after

    @property
    def greedy(self) -> bool:
        """Whether its tokens are the most likely ones, as the model gives them."""
        given = self._sampler
        return given is None or (
            given.row.greedy and not (given.penalties.active or given.logit_bias or given.forbidden)
        )

    def take(self, span: int, ahead: int = 0) -> RowTokens:
        """What a step of `span` tokens needs, behind one of `ahead` that is being computed."""
        start = self.computed + ahead
        pending = ahead > 0 and start == self.num_tokens
        return RowTokens(
            self,
            tuple(self._tokens[start : start + span]),
            gives=start + span == self.num_tokens + pending,
            num_outputs=len(self.outputs) + pending,
            pending=pending,
        )

    def skip(self) -> bool:
        """Whether the request wants to be left out of this step."""
        skipping = self._skips_left > 0
        self._skips_left -= skipping
        return skipping

    def tokens(self, span: int) -> list[int]:
        """The next `span` tokens to compute."""
        return self._tokens[self.computed : self.computed + span]

    def gives_token(self, span: int) -> bool:
        """Whether a step of `span` tokens reaches the end and so gives a new one."""
        return self.computed + span == self.num_tokens

    def accept(self, outputs: HostRow) -> None:
        """Take a step's values."""
        if "token" in outputs:
            self.outputs.append(outputs["token"])
            self._tokens.append(outputs["token"])
            self.numbers.append({name: outputs[name] for name in outputs if name != "token"})

    def work_after(self, span: int) -> Work | Outlook:
        self.strike(Stage.WORK_AFTER)
        total, computed = self.num_tokens, self.computed + span
        if computed < total:
            return Work(*self._place, total - computed, total, self._divisible)
        if len(self.outputs) + 1 >= self.count:
            return Outlook.ENDS
        return Work(*self._place, 1, total + 1, self._divisible)

    def next_work(self) -> Work | None:
        self.strike(Stage.NEXT_WORK)
        if len(self.outputs) >= self.count:
            return None
        total = self.num_tokens
        return Work(*self._place, total - self.computed, total, self._divisible)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        self.strike(Stage.CONFIGS)
        configs: dict[str, ResourceConfig] = {"kv": KVRequestConfig(self._tokens)}
        if self._sampler is not None:
            outputs = tuple(self.outputs)
            configs["sampler"] = replace(self._sampler, prompt_ids=self.prompt, output_ids=outputs)
        return configs

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
