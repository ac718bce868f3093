"""What an operator does to a running model: its memory given back and taken again, its weights
replaced, questions about them.

Every rank of a replica does the same at the same point between two steps. What is refused is refused
on all of them, before anything has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from phalanx.errors import (
    InvalidInputError,
    InvalidRequestError,
    RequestFailedError,
    WeightUpdateError,
)
from phalanx.loop.model_memory import ModelMemory
from phalanx.loop.resident_memory import ResidentMemory
from phalanx.loop.step_loop import StepLoop
from phalanx.models.causal_lm.weight_groups import WeightGroups
from phalanx.models.causal_lm.weight_questions import WeightQuestions
from phalanx.models.causal_lm.weight_store import DecoderWeights
from phalanx.models.causal_lm.weight_version import ServedVersion
from phalanx.parallel.ranks import Ranks
from phalanx.schema.control import (
    CheckWeights,
    JoinWeightGroup,
    LeaveWeightGroup,
    LoadWeights,
    Question,
    ReceiveWeights,
    ReplaceWeights,
    SetWeightVersion,
    Sleep,
    Wake,
    WeightAnswer,
    WeightCheck,
)
from phalanx.step.attempt import attempt
from phalanx.step.engine import StepEngine

WeightOp = LoadWeights | ReplaceWeights | ReceiveWeights
Operation = Sleep | Wake | WeightOp | SetWeightVersion | JoinWeightGroup | LeaveWeightGroup


class Operations:
    """See the module. The loop must compute nothing while `memory` is not ready."""

    def __init__(
        self,
        engine: StepEngine,
        loop: StepLoop,
        weights: DecoderWeights,
        ranks: Ranks,
        groups: WeightGroups,
        resident: ResidentMemory,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self.weights = self._weights = weights
        self.memory = self._memory = ModelMemory(engine, loop, weights, ranks, resident)
        self._ranks = ranks
        self._groups = groups
        self._questions = WeightQuestions(weights, ranks)
        self.served = ServedVersion()

    def apply(self, op: Operation, *, at_rest: bool) -> bool:
        """Apply `op`; False where it was refused. `at_rest`: no request is live, or all are paused.

        Raises the errors that `BatchingEntry.control` may raise.
        """
        match op:
            case Sleep(tags=tags):
                return self._memory.sleep(tags, at_rest=at_rest)
            case Wake(tags=tags):
                self._memory.wake(tags)
            case LoadWeights(path=path, version=version):
                self._memory.expect_weights()
                self._check(partial(self._weights.check_directory, Path(path)))
                self._change(partial(self._weights.replace_all, Path(path)), version)
                self._engine.backend.release_cached_memory()
            case ReplaceWeights(tensors=tensors, version=version):
                self._replace(tensors, version)
            case ReceiveWeights():
                self._receive(op)
            case SetWeightVersion(version=version):
                self.served.update(version)
            case JoinWeightGroup():
                self._join(op)
            case LeaveWeightGroup(group_name=name):
                self._groups.leave(name)
        return True

    def ask(self, question: Question) -> WeightAnswer:
        """Raises `InvalidRequestError` where there is no answer."""
        self._memory.expect_weights()
        if not self._weights.complete:
            raise InvalidRequestError("the engine waits for weights; send all of them first")
        answer = self._questions.answer(question)
        if isinstance(question, CheckWeights) and question.action is WeightCheck.RESET_TENSORS:
            self._renewed(None)
        return answer

    def close(self) -> None:
        self._groups.close()

    def _replace(self, tensors: Mapping[str, Tensor], version: str | None) -> None:
        self._memory.expect_weights()
        for name, tensor in tensors.items():
            self._weights.check_weight(name, tensor)
        with self._memory.coming(tensor.nbytes for tensor in tensors.values()):
            self._change(partial(self._weights.replace, tensors), version)

    def _receive(self, op: ReceiveWeights) -> None:
        self._memory.expect_weights()
        wanted = self._groups.announced(op)
        for name, shape, dtype in wanted:
            self._weights.check_shape(name, shape, dtype)
        with self._memory.coming(math.prod(shape) * dtype.itemsize for _, shape, dtype in wanted):
            received: dict[str, Tensor] = {}
            failed = self._memory.failed(
                partial(self._groups.receive, op.group_name, wanted, received)
            )
            if failed is not None:
                self._groups.leave(op.group_name)
                raise WeightUpdateError(
                    f"{failed}. Nothing has changed; join the weight group {op.group_name!r} again"
                )
            self._change(partial(self._weights.replace, received), op.version)

    def _join(self, op: JoinWeightGroup) -> None:
        self._groups.check(op, self._ranks.size)
        failed = self._memory.failed(partial(self._groups.join, op, self._ranks.rank))
        if failed is not None:
            self._groups.leave(op.group_name)
            raise WeightUpdateError(failed)

    def _change(self, put: Callable[[], None], version: str | None) -> None:
        """Put weights that fit in place of the old ones."""
        self._loop.push_back_all()
        failed = self._memory.failed(put)
        if failed is not None:
            self._weights.lose()
            self._memory.drop_captures()
            raise RequestFailedError(
                f"the new weights could not be put in, which has lost the old ones too: {failed}. "
                "The engine waits for weights; send all of them"
            )
        self._renewed(version)

    def _renewed(self, version: str | None) -> None:
        """Other weights are there: what was made for the old ones is made anew."""
        self._loop.push_back_all()
        self._engine.prefixes.forget()
        self.served.update(version)
        if not self._weights.stay_in_place:
            self._memory.drop_captures()
        self._memory.warm_up()

    def _check(self, check: Callable[[], None]) -> None:
        """Raise on every rank what `check` refuses on one."""
        made = attempt(check)
        if made.error is not None and not isinstance(made.error, InvalidInputError):
            raise made.error
        refusal = self._ranks.first_said(None if made.error is None else str(made.error))
        if refusal is not None:
            field = made.error.field if isinstance(made.error, InvalidRequestError) else ""
            raise InvalidRequestError(refusal, field=field) from made.error
