"""From a request to its sequences: the prompt as tokens, and what each completion has of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm.grammar_queue import Prompt
from phalanx.models.causal_lm.sequence import Kept, Own, Sequence, SequenceLimits
from phalanx.models.causal_lm.text_output import TextOutput
from phalanx.models.causal_lm.token_grammar import TokenGrammar
from phalanx.models.causal_lm.validation import check_prompt
from phalanx.models.causal_lm.weight_version import ServedVersion
from phalanx.processing.text import (
    IncrementalDetokenizer,
    StopMatcher,
    StopPattern,
    StopStrings,
    TextTokenizer,
    compile_stop_regex,
)
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.limits import Limits

_SEPARATOR = "\0"
"""Between a request's id and the index of one of its completions."""


def child_id(rid: str, index: int, count: int) -> str:
    """The id in the loop of one of `count` completions."""
    return rid if count == 1 else f"{rid}{_SEPARATOR}{index}"


class SequenceMaker:
    """See the module."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        sequence_limits: SequenceLimits,
        limits: Limits,
        keep: Callable[[str], Kept],
        served: ServedVersion,
    ) -> None:
        """`keep` holds a sequence's state, by its id in the loop, for another engine."""
        self._served = served
        self._tokenizer = tokenizer
        self._sequence_limits = sequence_limits
        self._limits = limits
        self._keep = keep

    def prompt(self, rid: str, request: GenerateRequest) -> Prompt:
        """The prompt's tokens. Raises `InvalidRequestError`."""
        if _SEPARATOR in rid:
            raise InvalidRequestError(f"rid={rid!r} must not hold a NUL character", field="rid")
        if request.detokenize:
            self._text_tokenizer()
        ids = request.input_ids
        if ids is None:
            assert request.prompt is not None
            ids = tuple(self._text_tokenizer().encode(request.prompt))
            check_prompt(len(ids), request, self._limits)
        return Prompt(rid, request, ids)

    def make(self, prompt: Prompt, grammar: TokenGrammar | None) -> list[Sequence]:
        """One sequence a completion, each at the start of its own copy of `grammar`."""
        request = prompt.request
        strings = StopStrings(request.sampling.stop)
        patterns = compile_stop_regex(request.sampling.stop_regex)
        return [
            Sequence(
                prompt.rid,
                request,
                prompt.ids,
                self._sequence_limits,
                Own(
                    self._text(request, strings, patterns),
                    index,
                    None if grammar is None else grammar.copy(),
                    partial(self._keep, child_id(prompt.rid, index, request.sampling.n)),
                    self._served,
                ),
            )
            for index in range(request.sampling.n)
        ]

    def _text(
        self, request: GenerateRequest, strings: StopStrings, patterns: tuple[StopPattern, ...]
    ) -> TextOutput | None:
        if not request.detokenize:
            return None
        sampling = request.sampling
        matcher = None
        if sampling.stop or patterns:
            matcher = StopMatcher(strings, patterns, no_stop_trim=sampling.no_stop_trim)
        detokenizer = IncrementalDetokenizer(
            self._text_tokenizer(), skip_special_tokens=sampling.skip_special_tokens
        )
        return TextOutput(detokenizer, matcher)

    def _text_tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer; give input_ids and detokenize=False",
                field="prompt",
            )
        return self._tokenizer
