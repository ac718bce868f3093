"""What `extensions_json` of a request says beside the typed fields."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.errors import BodyTooLargeError, InvalidRequestError, MalformedRequestError
from phalanx.wire.body import BodyDecoder

FIELD = "extensions_json"
MAX_BYTES = 1 << 20
LEROBOT = "lerobot"


class Extensions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`instructions`: one a row of a batch. `lerobot`: the settings of LeRobot's client."""

    instructions: list[str] | None = None
    parameters: dict[str, Any] = {}
    lerobot: dict[str, Any] | None = None


_DECODER = BodyDecoder(Extensions)


def decode_extensions(text: str) -> Extensions:
    """Raises `MalformedRequestError` or `BodyTooLargeError`, with the field's path."""
    if not text:
        return Extensions()
    _check_size(len(text))
    try:
        return _DECODER.decode(text.encode())
    except MalformedRequestError as error:
        path = f"{FIELD}.{error.field}" if error.field else FIELD
        raise MalformedRequestError(f"{FIELD}: {error}", field=path) from error


def encode_extensions(extensions: Extensions) -> str:
    """The JSON text; "" where there is nothing to say. What no server would take is refused."""
    if extensions == Extensions():
        return ""
    try:
        text = msgspec.json.encode(extensions).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the parameters cannot be sent as JSON: {error}", field="parameters"
        ) from error
    _check_size(len(text))
    return text


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise BodyTooLargeError(
            f"{FIELD} has {size} characters; at most {MAX_BYTES} are taken. Send arrays as inputs",
            field=FIELD,
        )
