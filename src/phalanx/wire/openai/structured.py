"""How a request says in what form its answer must be: OpenAI's way, SGLang's fields and vLLM's."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from phalanx.errors import InvalidRequestError

ANY_OBJECT = '{"type":"object"}'


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format`."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def fields(self) -> dict[str, str]:
        """The one that is given, as the schema names and writes it."""
        given: dict[str, str] = {}
        if self.json is not None:
            text = self.json if isinstance(self.json, str) else msgspec.json.encode(self.json)
            given["json_schema"] = text if isinstance(text, str) else text.decode()
        if self.json_object:
            given["json_schema"] = ANY_OBJECT
        if self.regex is not None:
            given["regex"] = self.regex
        if self.choice:
            given["regex"] = "|".join(map(re.escape, self.choice))
        if self.grammar is not None:
            given["ebnf"] = self.grammar
        wanted = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(one is not None for one in wanted) > 1:
            raise InvalidRequestError(
                "structured_outputs has several forms; give one of json, json_object, regex, "
                "choice and grammar",
                field="structured_outputs",
            )
        return given


def grammar_fields(
    own: dict[str, str | None],
    wanted: ResponseFormat | None,
    structured: StructuredOutputs | None,
) -> dict[str, str | None]:
    """`json_schema`, `regex` and `ebnf` for sampling; `own` are the fields of these names."""
    fields = dict(own)
    if wanted is not None and wanted.type != "text":
        if own["json_schema"] is not None:
            raise InvalidRequestError(
                "json_schema and response_format exclude each other", field="response_format"
            )
        fields["json_schema"] = _of_format(wanted)
    for name, value in (structured.fields() if structured is not None else {}).items():
        if fields[name] is not None:
            raise InvalidRequestError(
                f"structured_outputs and {name} exclude each other", field="structured_outputs"
            )
        fields[name] = value
    return fields


def _of_format(wanted: ResponseFormat) -> str:
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise InvalidRequestError(
                "response_format.json_schema.schema is missing; give the JSON schema",
                field="response_format.json_schema.schema",
            )
        return msgspec.json.encode(wanted.json_schema.schema).decode()
    raise InvalidRequestError(
        f"response_format.type={wanted.type!r}; allowed: text, json_object, json_schema",
        field="response_format.type",
    )
