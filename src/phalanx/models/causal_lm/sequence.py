"""One completion of one prompt: its tokens, what has been computed of them, and when it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.loop.outlook import Foreseeing, Outlook
from phalanx.loop.request import Work
from phalanx.models.causal_lm.logprobs import LogprobRecord
from phalanx.models.causal_lm.row_input import RowInput
from phalanx.models.causal_lm.text_output import TextOutput
from phalanx.models.causal_lm.token_grammar import TokenGrammar
from phalanx.models.causal_lm.weight_version import ServedVersion, VersionRecord
from phalanx.schema.generate import (
    Abort,
    Completion,
    FinishReason,
    GenerateDelta,
    GenerateOutput,
    GenerateRequest,
    Handoff,
    Length,
    SequenceHandoff,
    Stop,
)
from phalanx.schema.handoff import PublishedKV
from phalanx.schema.sampling import SamplingParams
from phalanx.step.outputs import HostRow
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.kv_step import KVRequestConfig
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter

NODE = "decoder"
WALK = "generate"


@dataclass(frozen=True)
class SequenceLimits:
    """What ends every sequence of a model."""

    eos_ids: frozenset[int]
    context_length: int


@dataclass(frozen=True)
class Kept:
    """A sequence's state as other engines find it."""

    kv: PublishedKV | None = None
    positions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Own:
    """What one sequence does not share with the other completions of its request.

    `served` is the version of the weights that compute it. `keep` holds what is stored of it for
    another engine; None where nothing is handed over.
    """

    text: TextOutput | None
    index: int = 0
    grammar: TokenGrammar | None = None
    keep: Callable[[], Kept] | None = None
    served: ServedVersion = field(default_factory=ServedVersion)


class Sequence(Foreseeing):
    """A `RequestState`: prompt and output tokens, of which the first `computed` are in the cache."""

    def __init__(
        self,
        rid: str,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        limits: SequenceLimits,
        own: Own,
    ) -> None:
        self.request = request
        self.index = own.index
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.computed = 0
        self.cached_tokens = 0
        """Prompt tokens that were never computed for this sequence."""
        self.scores = LogprobRecord(request.logprobs, len(prompt_ids))
        self.num_push_backs = 0
        self._tokens = [*prompt_ids]
        """Prompt and output; grows at its end only."""
        self._limits = limits
        self._text = own.text
        self._grammar = own.grammar
        self._keep = own.keep
        self._served = own.served
        self._versions = VersionRecord(own.served)
        self._scored_with = own.served.serial
        self._finish: FinishReason | None = None
        self._goes_on = False
        """Whether it ends here only to go on elsewhere."""
        self._num_reported = 0
        self._num_computed_here = 0
        self._seed = _seed(rid, request.sampling, own.index)
        wanted = frozenset(request.sampling.stop_token_ids)
        self.stop_ids = wanted if request.sampling.ignore_eos else wanted | limits.eos_ids
        """Ids that end the text."""
        self._ends = wanted | limits.eos_ids
        """Ids that must not come before `min_new_tokens`."""
        if request.handoff is not None:
            self._resume(request.handoff.sequences[own.index])

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def has_run(self) -> bool:
        """Whether a step computed some of it here."""
        return self._num_computed_here > 0

    @property
    def constrained(self) -> bool:
        """Whether a grammar decides which tokens may come next."""
        return self._grammar is not None

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, bool [vocabulary]; of constrained sequences only.

        No end before `min_new_tokens`, unless nothing else is left.
        """
        assert self._grammar is not None
        allowed = self._grammar.allowed
        if self._holds_back:
            longer = allowed.copy()
            longer[list(self._ends)] = False
            return longer if longer.any() else allowed
        return allowed

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids of positions `start` to `end`."""
        return self._tokens[start:end]

    def step_input(self, span: int, ahead: int) -> RowInput:
        """What a step of `span` tokens needs, behind one of `ahead` that is being computed."""
        start = self.computed + ahead
        pending = ahead > 0 and start == self.num_tokens
        samples = start + span == self.num_tokens + pending and self.sampling.max_new_tokens > 0
        if pending:
            return RowInput.awaiting(start, samples=samples)
        return RowInput(self._tokens[start : start + span], start, samples)

    def work_after(self, span: int) -> Work | Outlook:
        """Unknown where a step is prepared by what the one before it gave: by a grammar's state, or
        by how much of the prompt is scored.
        """
        if self.constrained or self.scores.num_unscored is not None:
            return Outlook.UNKNOWN
        total, computed = self.num_tokens, self.computed + span
        if computed < total:
            return Work(NODE, WALK, total - computed, total)
        longest = total + 1 >= self._limits.context_length
        last = len(self.output_ids) + 1 >= self.sampling.max_new_tokens
        if longest or last or self.request.hands_over:
            return Outlook.ENDS
        return Work(NODE, WALK, 1, total + 1)

    def next_work(self) -> Work | None:
        if self._finish is not None:
            return None
        total = self.num_tokens
        return Work(NODE, WALK, total - self.computed, total)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        self._score_anew_with_other_weights()
        forbidden = self._ends if self._holds_back and self._grammar is None else ()
        tokens = self.prompt_ids, tuple(self.output_ids)
        return {
            "kv": KVRequestConfig(self._tokens, self.scores.num_unscored),
            "sampler": _sampler(self.sampling, self._seed, forbidden, tokens),
        }

    def advance(self, span: int) -> None:
        self.computed += span
        self._num_computed_here += span
        if self.sampling.max_new_tokens == 0 and self.computed == self.num_tokens:
            self._finish = Length(0)

    def adopt(self, num_tokens: int) -> None:
        self.computed += num_tokens
        if not self.num_push_backs:
            self.cached_tokens += num_tokens

    def push_back(self) -> None:
        self.computed = 0
        self.num_push_backs += 1

    def accept(self, outputs: HostRow) -> bool:
        """Take a step's values; True when the sequence has ended."""
        self.scores.take_prompt(outputs)
        token = outputs.get("token")
        if token is not None:
            self._versions.note(len(self.output_ids))
            self.scores.take_output(outputs, token)
            self._append(token)
            if self._finish is None and self.request.hands_over:
                self._goes_on, self._finish = True, Length(len(self.output_ids))
        return self._finish is not None

    def _append(self, token: int) -> None:
        self.output_ids.append(token)
        self._tokens.append(token)
        self._finish = self._finish_after(token)

    def _score_anew_with_other_weights(self) -> None:
        """All scores of a prompt are of one version: those that nobody has seen give way."""
        if self._scored_with != self._served.serial and not self.output_ids:
            self._scored_with = self._served.serial
            self.scores = LogprobRecord(self.request.logprobs, len(self.prompt_ids))

    def _resume(self, done: SequenceHandoff) -> None:
        """Stand where another engine stopped; what it stored is imported, or computed again."""
        self._seed = done.seed
        self.cached_tokens = done.cached_tokens
        self.scores = LogprobRecord.resumed(
            self.request.logprobs, len(self.prompt_ids), done.logprobs
        )
        self._versions = VersionRecord(self._served, done.weight_versions)
        for token in done.output_ids:
            self._append(token)
        if self.sampling.max_new_tokens == 0:
            self._finish = Length(0)
        if done.kv is not None:
            self.computed = len(self.prompt_ids)

    def take_delta(self) -> GenerateDelta | None:
        fresh = self.output_ids[self._num_reported :]
        if not fresh and self._finish is None:
            return None
        reported, self._num_reported = self._num_reported, len(self.output_ids)
        return GenerateDelta(
            index=self.index,
            token_ids=tuple(fresh),
            text=None if self._text is None else self._text.take(),
            logprobs=self.scores.take_output_delta(),
            prompt_logprobs=self.scores.take_prompt_delta(),
            finish_reason=self._finish,
            weight_versions=self._versions.spans(reported, self._num_reported),
        )

    def output(self, *, cancelled: bool) -> GenerateOutput:
        if self._text is not None and self._finish is None:
            self._text.finish()
        reason = Abort() if cancelled and self._finish is None else self._finish
        assert reason is not None
        return GenerateOutput(
            completions=(
                Completion(
                    token_ids=tuple(self.output_ids),
                    text=None if self._text is None else self._text.whole,
                    finish_reason=reason,
                    logprobs=self.scores.output,
                    weight_versions=self._versions.spans(0, len(self.output_ids)),
                ),
            ),
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_push_backs,
            prompt_logprobs=self.scores.prompt,
            weight_version=self._versions.newest,
            handoff=self._handoff(cancelled=cancelled),
        )

    def _handoff(self, *, cancelled: bool) -> Handoff | None:
        """What another engine needs to go on; where it need not, there is nothing to read."""
        if not self.request.hands_over or (cancelled and self._finish is None):
            return None
        kept = self._keep() if self._goes_on and self._keep is not None else Kept()
        done = SequenceHandoff(
            seed=self._seed,
            output_ids=tuple(self.output_ids),
            cached_tokens=self.cached_tokens,
            logprobs=self.scores.output,
            kv=kept.kv,
            positions=kept.positions,
            weight_versions=self._versions.spans(0, len(self.output_ids)),
        )
        return Handoff(num_prompt_tokens=len(self.prompt_ids), sequences=(done,))

    @property
    def _holds_back(self) -> bool:
        return len(self.output_ids) < self.sampling.min_new_tokens

    def _finish_after(self, token: int) -> FinishReason | None:
        count = len(self.output_ids)
        if token in self.stop_ids and count >= self.sampling.min_new_tokens:
            if self._text is not None:
                self._text.finish(token if self.sampling.no_stop_trim else None)
            return Stop(token)
        if self._text is not None:
            matched = self._text.feed(token, count >= self.sampling.min_new_tokens)
            if matched is not None:
                return Stop(matched)
        if self._grammar is not None:
            self._grammar.advance(token)
            if self._grammar.ended:
                if self._text is not None:
                    self._text.finish()
                return Stop()
        if count >= self.sampling.max_new_tokens or self.num_tokens >= self._limits.context_length:
            if self._text is not None:
                self._text.finish()
            return Length(count)
        return None


def _sampler(
    sampling: SamplingParams,
    seed: int,
    forbidden: Collection[int],
    tokens: tuple[tuple[int, ...], tuple[int, ...]],
) -> SamplerConfig:
    """`forbidden` ids must not come before `min_new_tokens`; `tokens` are prompt and output."""
    return SamplerConfig(
        row=_row_filter(sampling),
        seed=seed,
        penalties=_penalties(sampling),
        logit_bias=sampling.logit_bias,
        forbidden=tuple(sorted(forbidden)),
        forbidden_until=sampling.min_new_tokens if forbidden else 0,
        prompt_ids=tokens[0],
        output_ids=tokens[1],
    )


def _row_filter(sampling: SamplingParams) -> RowFilter:
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return RowFilter(temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def _penalties(sampling: SamplingParams) -> Penalties:
    return Penalties(
        sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
    )


def _seed(rid: str, sampling: SamplingParams, index: int) -> int:
    """The request's own seed, else one from its id, so that a pinned id reproduces its draws.

    Completions of one request differ by their index.
    """
    seed = sampling.sampling_seed
    if seed is None:
        seed = int.from_bytes(
            hashlib.md5(rid.encode(), usedforsecurity=False).digest()[:4], "little"
        )
    return seed if index == 0 else (seed * 1_000_003 + index) & (2**63 - 1)
