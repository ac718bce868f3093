"""Grammars of structured output as a request gives them: a JSON schema, a regular expression, or
rules in GBNF (llama.cpp's dialect of EBNF, which SGLang calls `ebnf`).

What can be seen without a tokenizer is refused in the caller's process; a long grammar is checked
only where it is compiled, since that may take a second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from phalanx.errors import InvalidRequestError
from phalanx.schema.sampling import GRAMMAR_FIELDS, SamplingParams

try:
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

ANY_OBJECT = "$$ANY$$"
"""What SGLang's protocol writes for a schema of any JSON object."""

MAX_CHARACTERS = {"json_schema": 1 << 18, "regex": 1 << 16, "ebnf": 1 << 14}
_CHECKED_AT_ONCE = 4096
"""Characters of a grammar that is checked in milliseconds."""

_WHITESPACE = r"\n?[ \t]{0,24}"
"""Between the tokens of JSON: room for indented lines, but no end of blanks."""


@dataclass(frozen=True)
class GrammarSource:
    """A grammar's text, and the request's field that holds it."""

    field: str
    text: str

    @classmethod
    def of(cls, sampling: SamplingParams) -> GrammarSource | None:
        """The one that constrains the output, if any."""
        given = (sampling.json_schema, sampling.regex, sampling.ebnf)
        for field, text in zip(GRAMMAR_FIELDS, given, strict=True):
            if text is not None:
                return cls(field, text)
        return None

    def serialized(self) -> str:
        """The grammar in the compiler's form. Raises `InvalidRequestError` for malformed text."""
        match self.field:
            case "json_schema":
                return _from_json_schema(self)
            case "regex":
                return _from_regex(self)
            case _:
                return _from_gbnf(self)

    def refusal(self, reason: str) -> InvalidRequestError:
        """This grammar cannot be used, for `reason`."""
        return InvalidRequestError(f"{self.field} cannot be used: {reason}", field=self.field)


def check_grammar(sampling: SamplingParams) -> None:
    """Refuse structured output that cannot be had, as far as that shows without a tokenizer."""
    source = GrammarSource.of(sampling)
    if source is None:
        return
    if not AVAILABLE:
        raise source.refusal(
            "structured output needs llguidance; install it with `pip install phalanx[structured]`"
        )
    longest = MAX_CHARACTERS[source.field]
    if not isinstance(source.text, str) or len(source.text) > longest:
        raise source.refusal(f"it must be a text of at most {longest} characters")
    if len(source.text) > _CHECKED_AT_ONCE:
        return
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source.serialized())
    if is_error:
        raise source.refusal("; ".join(messages))


def _from_json_schema(source: GrammarSource) -> str:
    text = _schema_text(source)
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError as error:
        raise source.refusal(str(error)) from error
    return grammar


def _schema_text(source: GrammarSource) -> str:
    if source.text == ANY_OBJECT:
        return '{"type": "object"}'
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise source.refusal(f"it is not JSON ({error})") from error
    if schema is True:
        return "{}"
    if schema is False:
        raise source.refusal("nothing matches the schema false")
    if not isinstance(schema, dict):
        raise source.refusal("a schema is a JSON object or true")
    return source.text


def _from_regex(source: GrammarSource) -> str:
    r"""`\d` and `\w` mean ASCII, as in JavaScript and in SGLang's own compiler."""
    grammar: str = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source.text, 'dw')}/")
    return grammar


def _from_gbnf(source: GrammarSource) -> str:
    try:
        rules: str = gbnf_to_lark(source.text)
    except Exception as error:  # the library raises nothing narrower
        raise source.refusal(f"it is not GBNF ({error})") from error
    grammar: str = LLMatcher.grammar_from_lark(rules)
    return grammar
