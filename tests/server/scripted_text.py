"""A text model without weights: it answers with its prompt's ids, one a tick, then ends the turn.

Prompts are taken in at 8 tokens a tick; `max_batch_size` requests run at once, others wait.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.engine_config import EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.plugin import BatchingEntry, Delta, Event, Failed, Final, Scheduled
from phalanx.processing.text import (
    IncrementalDetokenizer,
    StopMatcher,
    TextTokenizer,
    compile_stop_regex,
)
from phalanx.schema.control import Continue, ControlOp, Flush, Pause, PauseMode
from phalanx.schema.generate import (
    Abort,
    Completion,
    FinishReason,
    GenerateDelta,
    GenerateOutput,
    GenerateRequest,
    Length,
    Stop,
    TokenLogprobs,
)
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics

PROMPT_TOKENS_A_TICK = 8
FAIL_AT_ONCE, FAIL_LATER = 666, 667
"""Sampling seeds that make a request fail at its first tick, or after three tokens."""


@dataclass(frozen=True)
class ScriptedArgs(EntryArgs):
    """`pace_s`: how long each tick takes. `vocab_size`, `eos`: of the tokenizer."""

    directory: Path
    context_length: int = 100_000
    max_batch_size: int = 64
    pace_s: float = 0.0


@dataclass(frozen=True)
class ScriptedServing:
    tokenizer: TextTokenizer
    model_info: dict[str, object]


@dataclass
class _Sequence:
    request: GenerateRequest
    prompt: tuple[int, ...]
    num_computed: int = 0
    scheduled: bool = False
    ids: list[int] = field(default_factory=list)
    piece: str = ""
    text: str = ""
    detokenizer: IncrementalDetokenizer | None = None
    matcher: StopMatcher | None = None


class ScriptedText(BatchingEntry):
    name = "scripted_text"
    args_cls = ScriptedArgs
    request_cls = GenerateRequest
    output_cls = GenerateOutput

    @staticmethod
    def validate(request: GenerateRequest, limits: Limits) -> None:
        ids = request.input_ids or ()
        assert limits.context_length is not None and limits.vocab_size is not None
        if len(ids) + request.sampling.max_new_tokens > limits.context_length:
            raise InvalidRequestError(
                f"the prompt's {len(ids)} tokens and max_new_tokens="
                f"{request.sampling.max_new_tokens} exceed the context of {limits.context_length}",
                field="max_new_tokens",
            )
        if any(not 0 <= one < limits.vocab_size for one in ids):
            raise InvalidRequestError("input_ids outside the vocabulary", field="input_ids")
        options = request.logprobs
        if options and options.prompt_start is not None and options.prompt_start > len(ids):
            raise InvalidRequestError(
                f"logprob_start_len={options.prompt_start} exceeds the prompt's {len(ids)} tokens",
                field="logprob_start_len",
            )
        compile_stop_regex(request.sampling.stop_regex)

    @classmethod
    def serving(cls, args: ScriptedArgs) -> ScriptedServing:
        info = {"model_path": str(args.directory), "model_type": "scripted"}
        return ScriptedServing(TextTokenizer(args.directory), info)

    def setup(self, args: ScriptedArgs) -> None:
        self._args = args
        self._tokenizer = TextTokenizer(args.directory)
        (self._eos,) = self._tokenizer.eos_token_ids
        self._pace = threading.Event()
        self._live: dict[str, _Sequence] = {}
        self._cancelled: list[str] = []
        self._paused = False
        self._num_steps = self._num_generated = self._last_batch = 0

    @property
    def limits(self) -> Limits:
        return Limits(
            context_length=self._args.context_length,
            pool_tokens=1_000_000,
            vocab_size=self._tokenizer.vocab_size,
            max_batch_size=self._args.max_batch_size,
        )

    def start(self, rid: str, request: GenerateRequest) -> None:
        assert request.input_ids is not None
        sequence = _Sequence(request, request.input_ids)
        sampling = request.sampling
        if request.detokenize:
            sequence.detokenizer = IncrementalDetokenizer(
                self._tokenizer, skip_special_tokens=sampling.skip_special_tokens
            )
            sequence.matcher = StopMatcher(
                sampling.stop,
                compile_stop_regex(sampling.stop_regex),
                no_stop_trim=sampling.no_stop_trim,
            )
        self._live[rid] = sequence

    def cancel(self, rid: str) -> None:
        if rid in self._live and rid not in self._cancelled:
            self._cancelled.append(rid)

    @property
    def busy(self) -> bool:
        return bool(self._cancelled) or (bool(self._live) and not self._paused)

    def tick(self) -> list[Event]:
        if self._args.pace_s:
            self._pace.wait(self._args.pace_s)
        events: list[Event] = []
        for rid in self._cancelled:
            sequence = self._live.pop(rid)
            if sequence.matcher is not None:
                sequence.text += sequence.matcher.finish()
            events.append(Final(rid, self._output(sequence, Abort()), cancelled=True))
        self._cancelled.clear()
        if not self._paused:
            batch = list(self._live.items())[: self._args.max_batch_size]
            self._num_steps += 1
            self._last_batch = len(batch)
            for rid, sequence in batch:
                events += self._advance(rid, sequence)
        return events

    def _advance(self, rid: str, sequence: _Sequence) -> list[Event]:
        events: list[Event] = []
        if not sequence.scheduled:
            sequence.scheduled = True
            events.append(Scheduled(rid))
        seed = sequence.request.sampling.sampling_seed
        if seed == FAIL_AT_ONCE or (seed == FAIL_LATER and len(sequence.ids) == 3):
            del self._live[rid]
            return [*events, Failed(rid, RuntimeError("scripted failure"))]
        if sequence.num_computed < len(sequence.prompt):
            sequence.num_computed += PROMPT_TOKENS_A_TICK
            return events
        limit = sequence.request.sampling.max_new_tokens
        reason: FinishReason | None = Length(0) if limit == 0 else None
        first = not sequence.ids
        if reason is None:
            reason = self._generate(sequence)
        if reason is not None and sequence.matcher is not None and not _by_text(reason):
            sequence.piece += sequence.matcher.finish()
        sequence.text += sequence.piece
        for index in range(sequence.request.sampling.n):
            events.append(Delta(rid, self._delta(sequence, index, first, reason)))
        if reason is not None:
            del self._live[rid]
            events.append(Final(rid, self._output(sequence, reason)))
        return events

    def _generate(self, sequence: _Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        script = sequence.prompt
        at = len(sequence.ids)
        ended = at >= len(script) and not sampling.ignore_eos
        token = self._eos if ended else script[at % len(script)]
        sequence.ids.append(token)
        sequence.piece = ""
        self._num_generated += 1
        matched = None
        stopping = token == self._eos or token in sampling.stop_token_ids
        if sequence.detokenizer is not None and not stopping:
            assert sequence.matcher is not None
            piece, matched = sequence.matcher.feed(sequence.detokenizer.feed([token]))
            sequence.piece = piece
        if matched is not None:
            return Stop(matched)
        if stopping and not sampling.ignore_eos:
            return Stop(token)
        return Length(sampling.max_new_tokens) if at + 1 >= sampling.max_new_tokens else None

    def _delta(
        self, sequence: _Sequence, index: int, first: bool, reason: FinishReason | None
    ) -> GenerateDelta:
        ids = tuple(sequence.ids[-1:])
        return GenerateDelta(
            index=index,
            token_ids=ids,
            text=sequence.piece if sequence.detokenizer is not None else None,
            logprobs=self._logprobs(sequence, ids),
            prompt_logprobs=self._prompt(sequence) if first and index == 0 else None,
            finish_reason=reason,
        )

    def _output(self, sequence: _Sequence, reason: FinishReason) -> GenerateOutput:
        ids = tuple(sequence.ids)
        text = sequence.text if sequence.detokenizer is not None else None
        completion = Completion(
            token_ids=ids, text=text, finish_reason=reason, logprobs=self._logprobs(sequence, ids)
        )
        return GenerateOutput(
            completions=(completion,) * sequence.request.sampling.n,
            prompt_tokens=len(sequence.prompt),
            prompt_logprobs=self._prompt(sequence),
        )

    def _prompt(self, sequence: _Sequence) -> TokenLogprobs | None:
        options = sequence.request.logprobs
        if options is None or options.prompt_start is None:
            return None
        ids = sequence.prompt[options.prompt_start :]
        scores = self._logprobs(sequence, ids)
        assert scores is not None
        if options.prompt_start > 0 or not ids:
            return scores
        return TokenLogprobs(
            token_ids=ids,
            values=(None, *scores.values[1:]),
            top=None if scores.top is None else (None, *scores.top[1:]),
            selected=None if scores.selected is None else (None, *scores.selected[1:]),
        )

    def _logprobs(self, sequence: _Sequence, ids: tuple[int, ...]) -> TokenLogprobs | None:
        options = sequence.request.logprobs
        if options is None:
            return None
        top = tuple((-0.5 * k - 0.25, k + 3) for k in range(options.top_k))
        selected = tuple((-1.0 - one / 8, one) for one in options.token_ids)
        return TokenLogprobs(
            token_ids=ids,
            values=tuple(-0.25 * (one % 4) for one in ids),
            top=(top,) * len(ids) if options.top_k else None,
            selected=(selected,) * len(ids) if options.token_ids else None,
        )

    def control(self, op: ControlOp) -> bool:
        match op:
            case Pause(mode=mode):
                self._paused = True
                if mode is PauseMode.ABORT:
                    self._cancelled = list(self._live)
                return True
            case Continue():
                self._paused = False
                return True
            case Flush():
                return not self._live

    def statistics(self) -> LoopStatistics:
        num_running = min(len(self._live), self._args.max_batch_size)
        return LoopStatistics(
            num_running=num_running,
            num_waiting=len(self._live) - num_running,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated,
            last_batch_size=self._last_batch,
            pool_tokens=1_000_000,
            pool_used_tokens=sum(len(one.prompt) + len(one.ids) for one in self._live.values()),
            paused=self._paused,
        )


def _by_text(reason: FinishReason) -> bool:
    return isinstance(reason, Stop) and isinstance(reason.matched, str)
