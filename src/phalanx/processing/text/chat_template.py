"""A checkpoint's chat template: conversations rendered to a prompt, in a sandbox.

The environment offers what templates are written against (the variables, filters and extensions
of Hugging Face's `apply_chat_template`) and nothing that reaches outside the template.
"""

from __future__ import annotations

import datetime
import functools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from phalanx.clock import Clock, SystemClock
from phalanx.errors import InvalidRequestError, MissingDependencyError

try:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise MissingDependencyError(
        "chat templates need jinja2; install it with `pip install phalanx[llm]`"
    ) from error

Message = Mapping[str, Any]
"""One turn: `role`, `content` (text or a list of parts) and what else the template reads."""


class ChatTemplate:
    """One template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._clock = clock if clock is not None else SystemClock()

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, dict[str, str], Clock]]:
        return ChatTemplate, (self._source, self._special_tokens, self._clock)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; `variables` are further names that the template may read.

        With `continue_final_message` the prompt ends inside the last message, for the model to go
        on with it. Raises `InvalidRequestError` where the template refuses the conversation.
        """
        values: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        values.update(
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        )
        values.setdefault("documents", None)
        text = self._rendered(messages, values)
        if not continue_final_message:
            return text
        mark = uuid.uuid4().hex
        marked = self._rendered(_with_mark(messages, mark), values)
        return _cut_at_final_message(text, marked, mark)

    def _rendered(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        try:
            return self._template.render({**values, "messages": list(messages)})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {error}", field="messages"
            ) from error

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now(self._clock)
        return environment.from_string(self._source)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks assistant text for training: only
    its body is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which jinja2's own filter would add."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(clock: Clock) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        return datetime.datetime.fromtimestamp(clock.wall_s()).strftime(format)

    return strftime_now


def _with_mark(messages: Sequence[Message], mark: str) -> list[Message]:
    """`messages` with `mark` behind the last one's text (the last of its parts that is text)."""
    if not messages:
        raise _cannot_continue()
    *earlier, last = messages
    content = last.get("content")
    if isinstance(content, str) and content.strip():
        return [*earlier, {**last, "content": content + mark}]
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = list(content)
        for at in reversed(range(len(parts))):
            part = parts[at]
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(part, Mapping) and isinstance(text, str) and text.strip():
                parts[at] = {**part, "text": text + mark}
                return [*earlier, {**last, "content": parts}]
    raise _cannot_continue()


def _cut_at_final_message(text: str, marked: str, mark: str) -> str:
    """`text` up to the end of the last message's content, without what closes the message.

    What follows the mark in `marked` is what closes the message. It is taken off `text`, not off
    `marked`: a template that strips the content cannot strip blanks that the mark follows.
    """
    _, found, closing = marked.rpartition(mark)
    if not found or not text.endswith(closing):
        raise _cannot_continue()
    return text.removesuffix(closing)


def _cannot_continue() -> InvalidRequestError:
    return InvalidRequestError(
        "continue_final_message=true needs a last message whose text is not blank and which the "
        "chat template renders to its end",
        field="continue_final_message",
    )
