"""A loaded language model and its loop: what the entry hands its calls to.

A request for n completions becomes n sequences; their events come back under the request's id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from phalanx.loop.service import LoopService
from phalanx.loop.step_loop import StepLoop
from phalanx.models.causal_lm.completions import Completions, combined
from phalanx.models.causal_lm.grammar import GrammarSource
from phalanx.models.causal_lm.grammar_queue import GrammarQueue, Prompt
from phalanx.models.causal_lm.handing_over import HandingOver, published
from phalanx.models.causal_lm.node import DecoderNode
from phalanx.models.causal_lm.operations import Operation, Operations
from phalanx.models.causal_lm.sequence import Sequence, SequenceLimits
from phalanx.models.causal_lm.sequence_maker import SequenceMaker, child_id
from phalanx.models.causal_lm.token_grammar import TokenGrammar
from phalanx.processing.text import TextTokenizer
from phalanx.schema.control import ControlOp, Question, WeightAnswer
from phalanx.schema.events import Delta, Event, Failed, Final
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics
from phalanx.step.attempt import attempt
from phalanx.step.engine import StepEngine
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.positions import Positions

_CANCELLED = "the request was cancelled before its computed prompt had come"


@dataclass(frozen=True)
class ServiceParts:
    """What computes a service's requests."""

    engine: StepEngine
    loop: StepLoop
    node: DecoderNode
    operations: Operations
    grammars: GrammarQueue


class CausalLMService(LoopService):
    """See the module. Called by one thread."""

    def __init__(
        self,
        parts: ServiceParts,
        limits: Limits,
        sequence_limits: SequenceLimits,
        tokenizer: TextTokenizer | None,
    ) -> None:
        engine, node = parts.engine, parts.node
        cache, positions = engine.resource("kv"), engine.resource("positions")
        assert isinstance(cache, KVCache) and isinstance(positions, Positions)
        self._cache = cache
        self._handing = HandingOver(cache, positions, node.num_ranks)
        self._arriving: dict[str, Sequence] = {}
        """Completions that begin with another engine's state."""
        super().__init__(engine, parts.loop, parts.operations.memory, limits)
        self._node = node
        self._operations = parts.operations
        self.weights = parts.operations.weights
        self._sequences = SequenceMaker(
            tokenizer, sequence_limits, limits, self._handing.keep, parts.operations.served
        )
        self._grammars = parts.grammars
        self._completions = Completions(self._drop, self._handing.drop)
        self._early: list[Event] = []
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    @property
    def busy(self) -> bool:
        compiling = len(self._grammars) > 0 and not self._loop.paused
        return bool(self._early) or self._loop.busy or compiling

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever something outside has made this busy, on any thread."""
        self._engine.waker.bind(wake)

    def start(self, rid: str, request: GenerateRequest) -> None:
        """Queue a request; what is only seen here (its text's length) ends it in `Failed`."""
        made = attempt(partial(self._begin, rid, request))
        if made.error is not None:
            self._fail_early(rid, request, made.error)

    def _begin(self, rid: str, request: GenerateRequest) -> None:
        memory = self._memory.state
        if not memory.ready:
            raise memory.refusal()
        prompt = self._sequences.prompt(rid, request)
        self._handing.check(request, len(prompt.ids))
        source = GrammarSource.of(request.sampling)
        if source is None:
            self._start(prompt, None)
            return
        grammar = self._grammars.find(source)
        if grammar is None:
            self._grammars.add(prompt, source)
        else:
            self._start(prompt, grammar)

    def cancel(self, rid: str) -> None:
        prompt = self._grammars.remove(rid)
        if prompt is not None:
            self._early.append(self._cancelled_early(prompt))
            return
        for child in self._completions.of(rid):
            self._loop.cancel(child)

    def tick(self) -> list[Event]:
        """Run one step. Raises `PhalanxDistError` where this rank cannot go on with the others."""
        if len(self._grammars) and not self._loop.paused:
            self._start_compiled()
        events, self._early = self._early, []
        for event in self._loop.tick():
            if self._completions.wants(event):
                self._note(event)
                events.extend(self._completions.reported(event))
        self._completions.end_tick()
        self._node.together.check()
        return events

    def operate(self, op: ControlOp, *, at_rest: bool) -> bool:
        assert isinstance(op, Operation)
        return self._operations.apply(op, at_rest=at_rest)

    def ask(self, question: Question) -> WeightAnswer:
        """Answer about the weights. Raises as `BatchingEntry.ask`."""
        self._loop.land()
        return self._operations.ask(question)

    def statistics(self) -> LoopStatistics:
        counted = super().statistics()
        return msgspec.structs.replace(
            counted,
            num_waiting=counted.num_waiting + len(self._grammars),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            pool_used_tokens=self._cache.used_tokens,
            pool_cached_tokens=self._cache.cached_tokens,
        )

    @property
    def idle(self) -> bool:
        return super().idle and len(self._grammars) == 0

    def cancel_all(self) -> None:
        self._early.extend(map(self._cancelled_early, self._grammars.remove_all()))
        super().cancel_all()

    def close(self) -> None:
        self._operations.close()
        super().close()
        self._grammars.close()

    def _drop(self, child: str, message: str) -> None:
        """End a completion of which nobody is told."""
        self._loop.drop(child)
        self._let_go(child, message)

    def _start(self, prompt: Prompt, grammar: TokenGrammar | None) -> None:
        """Queue a request's sequences, each at the start of its own copy of `grammar`."""
        rid, priority = prompt.rid, prompt.request.priority
        sequences = self._sequences.make(prompt, grammar)
        children = tuple(child_id(rid, index, len(sequences)) for index in range(len(sequences)))
        self._completions.open(rid, children)
        handoff = prompt.request.handoff
        for index, (child, sequence) in enumerate(zip(children, sequences, strict=True)):
            imports = {} if handoff is None else published(handoff.sequences[index])
            if imports:
                self._arriving[child] = sequence
            self._loop.start(child, sequence, priority, imports)

    def _start_compiled(self) -> None:
        patient = not (self._early or self._loop.busy)
        for prompt, grammar in self._grammars.take(patient=patient):
            if not isinstance(grammar, TokenGrammar):
                self._fail_early(prompt.rid, prompt.request, grammar)
                continue
            made = attempt(partial(self._start, prompt, grammar))
            if made.error is not None:
                self._fail_early(prompt.rid, prompt.request, made.error)

    def _fail_early(self, rid: str, request: GenerateRequest, error: Exception) -> None:
        """The end of a request that could not begin."""
        self._handing.drop(request.handoff, f"the request could not begin: {error}")
        self._early.append(Failed(rid, error))

    def _cancelled_early(self, prompt: Prompt) -> Final:
        """The end of a request that was cancelled before it could run."""
        self._handing.drop(prompt.request.handoff, _CANCELLED)
        outputs = [one.output(cancelled=True) for one in self._sequences.make(prompt, None)]
        return Final(prompt.rid, combined(outputs), cancelled=True)

    def _note(self, event: Event) -> None:
        """Count what a completion has gained, and let go of what it did not take."""
        if isinstance(event, Delta):
            self._num_generated_tokens += len(event.payload.token_ids)
        elif isinstance(event, Final | Failed) and event.rid in self._arriving:
            self._let_go(event.rid, _CANCELLED if isinstance(event, Final) else str(event.error))
        elif isinstance(event, Final):
            self._num_prompt_tokens += event.payload.prompt_tokens - event.payload.cached_tokens
            self._num_cached_tokens += event.payload.cached_tokens

    def _let_go(self, child: str, message: str) -> None:
        """A completion that began elsewhere has ended; its state may not have been read."""
        sequence = self._arriving.pop(child, None)
        if sequence is not None:
            self._handing.ended(sequence, message)
