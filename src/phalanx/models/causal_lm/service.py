"""A loaded language model and its loop: what the entry hands its calls to.

A request for n completions becomes n sequences; their events come back under the request's id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from phalanx.errors import PhalanxDistError
from phalanx.loop.step_loop import StepLoop
from phalanx.models.causal_lm.grammar import GrammarSource
from phalanx.models.causal_lm.grammar_queue import GrammarQueue, Prompt
from phalanx.models.causal_lm.handing_over import HandingOver, published
from phalanx.models.causal_lm.node import DecoderNode
from phalanx.models.causal_lm.sequence import Sequence, SequenceLimits
from phalanx.models.causal_lm.sequence_maker import SequenceMaker, child_id
from phalanx.models.causal_lm.token_grammar import TokenGrammar
from phalanx.processing.text import TextTokenizer
from phalanx.schema.control import (
    Continue,
    ControlOp,
    Flush,
    Pause,
    PauseMode,
)
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.generate import GenerateDelta, GenerateOutput, GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics
from phalanx.step.attempt import attempt
from phalanx.step.engine import StepEngine
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.positions import Positions

_CANCELLED = "the request was cancelled before its computed prompt had come"

_NOT_WHOLE = "another completion of the request could not be handed over"


@dataclass
class _Group:
    """The completions of one request that have not all ended."""

    children: tuple[str, ...]
    outputs: dict[str, GenerateOutput] = field(default_factory=dict)
    scheduled: bool = False
    cancelled: bool = False


class CausalLMService:
    """See the module. Called by one thread."""

    def __init__(
        self,
        engine: StepEngine,
        loop: StepLoop,
        node: DecoderNode,
        limits: Limits,
        sequence_limits: SequenceLimits,
        tokenizer: TextTokenizer | None,
        grammars: GrammarQueue,
    ) -> None:
        cache, positions = engine.resource("kv"), engine.resource("positions")
        assert isinstance(cache, KVCache) and isinstance(positions, Positions)
        self._cache = cache
        self._handing = HandingOver(cache, positions, node.num_ranks)
        self._arriving: dict[str, Sequence] = {}
        """Completions that begin with another engine's state."""
        self.limits = limits
        self._engine = engine
        self._loop = loop
        self._node = node
        self._sequences = SequenceMaker(tokenizer, sequence_limits, limits, self._handing.keep)
        self._grammars = grammars
        self._groups: dict[str, _Group] = {}
        self._parents: dict[str, str] = {}
        self._early: list[Event] = []
        self._dropped: set[str] = set()
        """Completions of a failed request whose events of the running tick nobody wants."""
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
        group = self._groups.get(rid)
        for child in (rid,) if group is None else group.children:
            self._loop.cancel(child)

    def tick(self) -> list[Event]:
        """Run one step. Raises `PhalanxDistError` where this rank cannot go on with the others."""
        if len(self._grammars) and not self._loop.paused:
            self._start_compiled()
        events, self._early = self._early, []
        for event in self._loop.tick():
            if event.rid in self._dropped:
                if isinstance(event, Final):
                    self._handing.drop(event.payload.handoff, _NOT_WHOLE)
                continue
            self._note(event)
            rid = self._parents.get(event.rid)
            if rid is None:
                events.append(event)
            else:
                events.extend(self._of_group(rid, event))
        self._dropped.clear()
        failure = self._node.failure
        if failure is not None:
            raise PhalanxDistError(
                f"a step failed on this rank, which leaves the others waiting for it: {failure}"
            ) from failure
        return events

    def control(self, op: ControlOp) -> bool:
        match op:
            case Pause(mode):
                self._loop.paused = True
                if mode is PauseMode.ABORT:
                    self._cancel_all()
                elif mode is PauseMode.RETRACT:
                    self._loop.push_back_all()
                return True
            case Continue():
                self._loop.paused = False
                return True
            case Flush():
                self._loop.land()
                # What is held for another engine belongs to a request that is not over.
                waits = not self._loop.idle or len(self._grammars) > 0
                if waits or not self._engine.at_rest():
                    return False
                self._engine.prefixes.forget()
                return True
            case _:
                raise NotImplementedError(f"plugin 'causal_lm' does not do {type(op).__name__}")

    def statistics(self) -> LoopStatistics:
        cache = self._cache
        return LoopStatistics(
            num_running=self._loop.num_running,
            num_waiting=self._loop.num_waiting + len(self._grammars),
            num_steps=self._loop.num_steps,
            num_ahead=self._loop.num_ahead,
            num_discarded=self._loop.num_discarded,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_retractions=self._loop.num_push_backs,
            num_offloads=self._loop.num_offloads,
            num_reloads=self._loop.num_reloads,
            num_offloaded=self._loop.num_offloaded,
            last_batch_size=self._loop.last_batch_size,
            pool_tokens=self.limits.pool_tokens or 0,
            pool_used_tokens=cache.used_tokens,
            pool_cached_tokens=cache.cached_tokens,
            paused=self._loop.paused,
            stage_s=self._engine.stage_s(),
        )

    def close(self) -> None:
        self._cancel_all()
        self._grammars.close()
        self._loop.close()
        self._engine.shutdown()

    def _start(self, prompt: Prompt, grammar: TokenGrammar | None) -> None:
        """Queue a request's sequences, each at the start of its own copy of `grammar`."""
        rid, priority = prompt.rid, prompt.request.priority
        sequences = self._sequences.make(prompt, grammar)
        children = [child_id(rid, index, len(sequences)) for index in range(len(sequences))]
        if len(sequences) > 1:
            self._groups[rid] = _Group(tuple(children))
            self._parents.update(dict.fromkeys(children, rid))
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

    def _cancel_all(self) -> None:
        self._early.extend(map(self._cancelled_early, self._grammars.remove_all()))
        self._loop.cancel_all()

    def _cancelled_early(self, prompt: Prompt) -> Final:
        """The end of a request that was cancelled before it could run."""
        self._handing.drop(prompt.request.handoff, _CANCELLED)
        outputs = [one.output(cancelled=True) for one in self._sequences.make(prompt, None)]
        return Final(prompt.rid, _combined(outputs), cancelled=True)

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

    def _of_group(self, rid: str, event: Event) -> list[Event]:
        """A child's event as the group's: one `Scheduled`, one end when all children have ended."""
        group = self._groups[rid]
        match event:
            case Scheduled():
                first, group.scheduled = not group.scheduled, True
                return [Scheduled(rid)] if first else []
            case Delta(_, payload):
                return [Delta(rid, _without_repeated_prompt(payload))]
            case Final(child, payload, cancelled):
                group.outputs[child] = payload
                group.cancelled |= cancelled
                del self._parents[child]
                if len(group.outputs) < len(group.children):
                    return []
                del self._groups[rid]
                outputs = [group.outputs[child] for child in group.children]
                combined = _combined(outputs)
                if combined.handoff is None:
                    self._drop_held(group)
                return [Final(rid, combined, cancelled=group.cancelled)]
            case Failed(child, error):
                return self._fail_group(rid, group, child, error)

    def _fail_group(self, rid: str, group: _Group, child: str, error: Exception) -> list[Event]:
        """One completion's failure ends the request; its other completions are dropped."""
        del self._groups[rid]
        self._drop_held(group)
        for other in group.children:
            self._parents.pop(other, None)
            if other != child:
                self._loop.drop(other)
                self._dropped.add(other)
                self._let_go(other, str(error))
        return [Failed(rid, error)]

    def _drop_held(self, group: _Group) -> None:
        """Nobody will read what was held of the completions that have ended."""
        for output in group.outputs.values():
            self._handing.drop(output.handoff, _NOT_WHOLE)


def _without_repeated_prompt(delta: GenerateDelta) -> GenerateDelta:
    """Only completion 0 reports the prompt."""
    if delta.index == 0 or delta.prompt_logprobs is None:
        return delta
    return msgspec.structs.replace(delta, prompt_logprobs=None)


def _combined(outputs: list[GenerateOutput]) -> GenerateOutput:
    """The outputs of one prompt's completions as one."""
    handoffs = [output.handoff for output in outputs if output.handoff is not None]
    handoff = None
    if len(handoffs) == len(outputs):
        sequences = tuple(one for each in handoffs for one in each.sequences)
        handoff = msgspec.structs.replace(handoffs[0], sequences=sequences)
    return msgspec.structs.replace(
        outputs[0],
        handoff=handoff,
        completions=tuple(output.completions[0] for output in outputs),
        num_retractions=sum(output.num_retractions for output in outputs),
    )
