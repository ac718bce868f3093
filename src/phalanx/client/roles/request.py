"""One request of a role, as a gateway takes it and as an engine does."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from phalanx.errors import InvalidRequestError, WrongRequestTypeError
from phalanx.routing.roles.affinity import AFFINITY_HEADER
from phalanx.routing.roles.resolver import RoleSelector
from phalanx.routing.roles.snapshot import RoleModel

MAX_KEY = 1024
SELECTORS = ("model", "route_key")


class Kind(enum.Enum):
    """What is asked; the value is the path."""

    GENERATE = "/generate"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class RoleRequest:
    """`fields` is the caller's JSON object without what says where it goes, which `selector` holds."""

    kind: Kind
    fields: Mapping[str, object]
    selector: RoleSelector
    affinity: str | None = None

    @classmethod
    def of(
        cls,
        kind: Kind,
        payload: Mapping[str, object],
        model: str | None,
        route_key: str | None,
        affinity: str | None,
    ) -> RoleRequest:
        """Raises `InvalidRequestError` for a payload that is no mapping, and for a selector that is given twice or is no text."""
        if not isinstance(payload, Mapping):
            form = '{"text": "..."}' if kind is Kind.GENERATE else '{"messages": [...]}'
            raise WrongRequestTypeError(
                f"a request is the JSON object of {kind.value}, not {type(payload).__name__}; give a"
                f" mapping such as {form}"
            )
        selector = RoleSelector(
            _selected("model", model, payload), _selected("route_key", route_key, payload)
        )
        if affinity is not None and not (
            0 < len(affinity) <= MAX_KEY and affinity.isascii() and affinity.isprintable()
        ):
            raise InvalidRequestError(
                f"affinity {affinity[:80]!r} must be 1 to {MAX_KEY} printable ASCII characters",
                field="affinity",
            )
        fields = {name: value for name, value in payload.items() if name not in SELECTORS}
        return cls(kind, fields, selector, affinity)

    @property
    def needs_gateway(self) -> bool:
        """Whether engines would not understand it: messages at `/generate` are the gateway's."""
        return self.kind is Kind.GENERATE and "messages" in self.fields

    @property
    def path(self) -> str:
        return self.kind.value

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.affinity is None else {AFFINITY_HEADER: self.affinity}

    def streaming(self) -> RoleRequest:
        """The same, answered event by event."""
        if self.fields.get("stream") is False:
            raise InvalidRequestError(
                "stream is false in the request; leave it out, or call without `stream_`",
                field="stream",
            )
        return RoleRequest(self.kind, {**self.fields, "stream": True}, self.selector, self.affinity)

    def whole(self) -> RoleRequest:
        """The same, once it is certain that it is answered at once."""
        if self.fields.get("stream"):
            raise InvalidRequestError(
                "stream is set in the request; call the method that begins with `stream_`",
                field="stream",
            )
        return self

    def for_gateway(self) -> bytes:
        """The body with the selector in it, which the gateway reads."""
        given = {"model": self.selector.model, "route_key": self.selector.route_key}
        selected = {name: value for name, value in given.items() if value is not None}
        return _encoded({**self.fields, **selected})

    def for_engine(self, model: RoleModel | None) -> bytes:
        """The body as the gateway would pass it on: a chat names the model as its engines call it.

        `model` None is for an engine of which no more is known than its address.
        """
        if self.kind is Kind.GENERATE:
            return _encoded(self.fields)
        name = self.selector.model
        if model is not None:
            name = model.served_model_name or model.name
        return _encoded(self.fields if name is None else {**self.fields, "model": name})


def _selected(name: str, argument: str | None, payload: Mapping[str, object]) -> str | None:
    given = payload.get(name)
    if given is not None and not isinstance(given, str):
        raise InvalidRequestError(
            f"{name} is {type(given).__name__} in the request; give a string", field=name
        )
    if argument is not None and given is not None and argument != given:
        raise InvalidRequestError(
            f"{name}={argument!r:.80} is given, and {given!r:.80} in the request; give it once",
            field=name,
        )
    return given if argument is None else argument


def _encoded(fields: Mapping[str, object]) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the request cannot be written as JSON: {error}") from error
