"""Requests that wait for their grammar, which a thread of its own compiles: the loop goes on.

A grammar that was compiled before waits for nobody. Over several ranks a request goes on when all
have compiled its grammar, in the same step on each: no rank's own speed decides.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.models.causal_lm.grammar import GrammarSource
from phalanx.models.causal_lm.token_grammar import GrammarCompiler, TokenGrammar
from phalanx.schema.generate import GenerateRequest

_PATIENCE_S = 0.01
"""How long an otherwise idle loop waits for a grammar before it looks for messages again."""


@dataclass(frozen=True)
class Prompt:
    """A request with its prompt's tokens."""

    rid: str
    request: GenerateRequest
    ids: tuple[int, ...]


class _Progress(enum.IntEnum):
    """How far a compilation is; of several ranks the least counts."""

    PENDING = 0
    FAILED = 1
    READY = 2


@dataclass(frozen=True)
class _Waiting:
    prompt: Prompt
    source: GrammarSource
    future: Future[TokenGrammar]

    @property
    def progress(self) -> _Progress:
        if not self.future.done():
            return _Progress.PENDING
        return _Progress.READY if self.future.exception() is None else _Progress.FAILED


class GrammarQueue:
    """Called by the loop's thread."""

    def __init__(
        self, compiler: GrammarCompiler, least: Callable[[Sequence[int]], list[int]] = list
    ) -> None:
        """`least` gives the smallest of every rank's numbers, place by place."""
        self._compiler = compiler
        self._least = least
        self._waiting: dict[str, _Waiting] = {}
        self._compiling: dict[GrammarSource, Future[TokenGrammar]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="phalanx-grammar")

    def __len__(self) -> int:
        return len(self._waiting)

    def find(self, source: GrammarSource) -> TokenGrammar | None:
        """A grammar that is ready, at its start; None where its request must be added."""
        return self._compiler.find(source)

    def add(self, prompt: Prompt, source: GrammarSource) -> None:
        """Let a request wait; requests with the same grammar wait for one compilation."""
        future = self._compiling.get(source)
        if future is None:
            future = self._executor.submit(self._compiler.compile, source)
            self._compiling[source] = future
        self._waiting[prompt.rid] = _Waiting(prompt, source, future)

    def take(self, *, patient: bool) -> Iterator[tuple[Prompt, TokenGrammar | Exception]]:
        """Requests whose grammar is there, or why it is not; `patient` where nothing else waits."""
        if patient and self._waiting:
            wait(self._compiling.values(), _PATIENCE_S, FIRST_COMPLETED)
        everyone = list(self._waiting.values())
        agreed = self._least([waiting.progress for waiting in everyone])
        for waiting, progress in zip(everyone, agreed, strict=True):
            if progress != _Progress.PENDING:
                del self._waiting[waiting.prompt.rid]
                yield waiting.prompt, self._outcome(waiting, progress)
        self._drop_unwanted()

    def remove(self, rid: str) -> Prompt | None:
        """A waiting request, which waits no longer; None if there is no such."""
        waiting = self._waiting.pop(rid, None)
        if waiting is None:
            return None
        self._drop_unwanted()
        return waiting.prompt

    def remove_all(self) -> list[Prompt]:
        prompts = [waiting.prompt for waiting in self._waiting.values()]
        self._waiting.clear()
        self._drop_unwanted()
        return prompts

    def close(self) -> None:
        """Wait for the grammar in hand and leave the others."""
        self._executor.shutdown(cancel_futures=True)

    def _drop_unwanted(self) -> None:
        """Leave grammars that no request waits for."""
        wanted = {waiting.source for waiting in self._waiting.values()}
        for source in self._compiling.keys() - wanted:
            self._compiling.pop(source).cancel()

    def _outcome(self, waiting: _Waiting, progress: int) -> TokenGrammar | Exception:
        error = waiting.future.exception()
        if progress == _Progress.READY:
            grammar = waiting.future.result()
            self._compiler.keep(waiting.source, grammar)
            return grammar
        if error is None:
            return RequestFailedError(
                f"{waiting.source.field} could not be compiled on another rank"
            )
        if isinstance(error, InvalidRequestError):
            return error
        failure = RequestFailedError(f"{waiting.source.field} could not be compiled: {error}")
        failure.__cause__ = error
        return failure
