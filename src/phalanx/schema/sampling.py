"""How a language model's next token is chosen and when a generation ends.

Field names and defaults are those of SGLang's `sampling_params`; `max_new_tokens=0` scores the
prompt without generating. Values are checked when the object is built.
"""

from __future__ import annotations

import math

import msgspec

from phalanx.errors import InvalidRequestError

MAX_STOP_STRINGS = 256
MAX_STOP_EXPRESSIONS = 16
"""Expressions take long to compile (up to tens of milliseconds each) and to search for."""
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARACTERS = 16384
MAX_COMPLETIONS = 256
GREEDY_BELOW = 1e-5
"""Smaller temperatures are greedy: logits divided by them would leave the range of float32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and stopping of one request.

    `temperature` 0 (or all but 0) means greedy. `top_k` -1 keeps all tokens. `logit_bias` holds (token id, bias)
    pairs added to the logits. `sampling_seed` makes the draws reproducible whatever else is in
    the batch. At most one of `json_schema`, `regex`, `ebnf` constrains the output.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, low=0)
        _whole("min_new_tokens", self.min_new_tokens, low=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens={self.min_new_tokens} must not exceed "
                f"max_new_tokens={self.max_new_tokens}",
                field="min_new_tokens",
            )
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _whole("top_k", self.top_k, low=-1)
        if self.top_k == 0:
            raise InvalidRequestError(
                "top_k=0 keeps no token; use -1 for all or a positive number", field="top_k"
            )
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=2.0, open_low=True)
        _whole("n", self.n, low=1, high=MAX_COMPLETIONS)
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("stop_regex", self.stop_regex, MAX_STOP_EXPRESSIONS)
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, low=0)
        for token_id, bias in self.logit_bias:
            _whole("logit_bias", token_id, low=0)
            _number("logit_bias", bias, low=-100.0, high=100.0)
        if self.sampling_seed is not None:
            _whole("sampling_seed", self.sampling_seed, low=-(2**63), high=2**63 - 1)
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                f"{' and '.join(given)} exclude each other; give one of them", field=given[1]
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf")


def _whole(field: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{field}={value!r} must be an integer", field=field)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{field}={value} must be {span}", field=field)


def _number(
    field: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{field}={value!r} must be a number", field=field)
    inside = math.isfinite(value) and (value > low if open_low else value >= low) and value <= high
    if not inside:
        bound = "above" if open_low else "at least"
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise InvalidRequestError(
            f"{field}={value} must be a finite number, {bound} {low:g}{limit}", field=field
        )


def _strings(field: str, values: tuple[str, ...], most: int) -> None:
    if isinstance(values, str):
        raise InvalidRequestError(
            f"{field}={values!r} must be a sequence of strings, such as ({values!r},)", field=field
        )
    if len(values) > most:
        raise InvalidRequestError(
            f"{field} has {len(values)} entries; at most {most} are allowed",
            field=field,
        )
    for value in values:
        if not isinstance(value, str):
            raise InvalidRequestError(f"{field} entry {value!r} must be a string", field=field)
        if not 0 < len(value) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"{field} entry of {len(value)} characters; allowed are 1 to {MAX_STOP_LENGTH}",
                field=field,
            )
    total = sum(map(len, values))
    if total > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"{field} has {total} characters in all; at most {MAX_STOP_CHARACTERS} are allowed",
            field=field,
        )
