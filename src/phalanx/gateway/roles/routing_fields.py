"""What the body of a role's request says of where it goes, and the body without that.

Names that say where a request goes are this gateway's and its clients' alone: engines do not get
them. Everything else of a body is passed on byte for byte.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.errors import MalformedRequestError
from phalanx.gateway.roles.json_members import MemberValue, without_member

_MODEL, _ROUTE_KEY = b'"model"', b'"route_key"'
_UNSET = msgspec.UNSET
_FIELD = {"$.model": "model", "$.route_key": "route_key"}


class RoutingFields(msgspec.Struct, frozen=True):
    """UNSET is absent, None is null; either says nothing."""

    model: str | msgspec.UnsetType | None = msgspec.UNSET
    route_key: str | msgspec.UnsetType | None = msgspec.UNSET


class MessageFields(RoutingFields, frozen=True):
    """With what tells the messages of a judge's caller from an engine's own request."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


FieldsT = TypeVar("FieldsT", bound=RoutingFields)


def read_fields(decoder: msgspec.json.Decoder[FieldsT], body: bytes) -> FieldsT:
    """Raises `MalformedRequestError` for what is not a JSON object, or has other types there."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        told = str(error)
        for path, field in _FIELD.items():
            if path in told:
                raise MalformedRequestError(
                    f"the body's {field} must be a string: {told}", field=field
                ) from None
        raise MalformedRequestError(f"the body must be a JSON object: {told}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequestError(f"the body must be a JSON object: {error}") from None


def for_generate(body: bytes, fields: RoutingFields) -> bytes:
    """Without `model` and `route_key`: engines know neither at `/generate`."""
    if fields.model is not _UNSET:
        body = without_member(body, _MODEL)
    if fields.route_key is not _UNSET:
        body = without_member(body, _ROUTE_KEY)
    return body


def served_name(name: str) -> MemberValue:
    """What engines call a model, for `for_chat`."""
    return MemberValue(_MODEL, msgspec.json.encode(name))


def for_chat(body: bytes, fields: RoutingFields, served: MemberValue) -> bytes:
    """With `served` for its `model`, and without `route_key`."""
    body = served.put(body) if fields.model is not _UNSET else served.add(body)
    if fields.route_key is not _UNSET:
        body = without_member(body, _ROUTE_KEY)
    return body
