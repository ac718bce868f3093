"""A compiled grammar over a model's tokens, and the state of one output in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.models.causal_lm.grammar import AVAILABLE, GrammarSource
from phalanx.processing.text import TextTokenizer
from phalanx.processing.text.tokenizer import TOKENIZER_FILE

if AVAILABLE:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_NUM_CACHED = 64
_MAX_LEXER_STATES = 50_000
"""Bounds a grammar's memory to some 100 MB; typical ones need a few hundred states."""


class TokenGrammar:
    """One output's place in its grammar. `allowed` is bool [vocabulary]: what may come next."""

    def __init__(self, source: GrammarSource, matcher: Any, vocab_size: int) -> None:  # noqa: ANN401
        """Takes `matcher` over. Raises `RequestFailedError` if nothing can come next."""
        self._source = source
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.allowed = self._next_allowed()

    def copy(self) -> TokenGrammar:
        """An independent output that stands at the same place."""
        return TokenGrammar(self._source, self._matcher.deep_copy(), self._vocab_size)

    @property
    def complete(self) -> bool:
        """Whether the output so far is one that the grammar describes."""
        accepting: bool = self._matcher.is_accepting()
        return accepting

    @property
    def ended(self) -> bool:
        """Whether nothing but an end may follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def advance(self, token: int) -> None:
        """Take an allowed token. Raises `RequestFailedError` where the grammar leads nowhere."""
        self._matcher.consume_token(token)
        self._check()
        if not self.ended:
            self.allowed = self._next_allowed()

    def _next_allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).partition("\n")[0]
            raise RequestFailedError(
                f"the output cannot be continued under its {self._source.field}: {reason}; "
                "nothing matches it, or it is too complex"
            )


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the newest of them.

    `find` and `keep` belong to the loop's thread, `compile` may run in another one.
    """

    def __init__(
        self, tokenizer: TextTokenizer | None, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._vocabulary: Any = None
        self._kept: OrderedDict[GrammarSource, TokenGrammar] = OrderedDict()

    def find(self, source: GrammarSource) -> TokenGrammar | None:
        """A compiled grammar at its start, to be copied; None where it must be compiled."""
        grammar = self._kept.get(source)
        if grammar is not None:
            self._kept.move_to_end(source)
        return grammar

    def keep(self, source: GrammarSource, grammar: TokenGrammar) -> None:
        """Remember a compiled grammar, and forget the one that was unused for longest."""
        self._kept[source] = grammar
        if len(self._kept) > _NUM_CACHED:
            self._kept.popitem(last=False)

    def compile(self, source: GrammarSource) -> TokenGrammar:
        """Milliseconds for most grammars, after half a second for the vocabulary the first time.

        Raises `InvalidRequestError` for a grammar that is malformed, that nothing matches, or that
        is too complex.
        """
        matcher = LLMatcher(
            self._opened_vocabulary(source),
            source.serialized(),
            log_level=0,
            limits=LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False),
        )
        if matcher.is_error():
            raise source.refusal(str(matcher.get_error()))
        try:
            return TokenGrammar(source, matcher, self._vocab_size)
        except RequestFailedError as error:
            raise source.refusal(str(error)) from error

    def _opened_vocabulary(self, source: GrammarSource) -> Any:  # noqa: ANN401
        if self._vocabulary is None:
            if self._tokenizer is None:
                raise source.refusal("this checkpoint has no tokenizer")
            path = self._tokenizer.directory / TOKENIZER_FILE
            ends = sorted(self._eos_ids) or list(self._tokenizer.eos_token_ids) or None
            try:
                self._vocabulary = LLTokenizer(
                    path.read_text(encoding="utf-8"), n_vocab=self._vocab_size, eos_token=ends
                )
            except (OSError, ValueError) as error:
                raise InvalidRequestError(
                    f"structured output is not possible with the tokenizer {path}: {error}",
                    field=source.field,
                ) from error
        return self._vocabulary
