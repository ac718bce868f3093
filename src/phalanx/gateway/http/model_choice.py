"""Which model a relayed request is for: said by a field of its head, or by its JSON body.

The body is looked into and passed on as it came.
"""

from __future__ import annotations

import msgspec

from phalanx.errors import MalformedRequestError
from phalanx.gateway.http.incoming_request import IncomingRequest


class _Body(msgspec.Struct):
    model: str | None = None
    model_name: str | None = None


_decoder = msgspec.json.Decoder(_Body)


def is_told_by_body(request: IncomingRequest) -> bool:
    """Whether the body has to be there whole before a server can be chosen."""
    return request.is_json and request.has_body and request.model_field is None


def model_of(request: IncomingRequest) -> str | None:
    """The name that the request tells; None where it tells none.

    Raises `MalformedRequestError` where a name is not a string, or cannot be looked for.
    """
    known = request.known
    given = request.model_field if known is None else known.model
    if given is not None:
        return given.decode("utf-8", "replace")
    if not (request.is_json if known is None else known.is_json) or not request.parts:
        return None
    parts = request.parts
    try:
        body = _decoder.decode(parts[0] if len(parts) == 1 else b"".join(parts))
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise MalformedRequestError(
                f"the body's model: {error}; name the model as a string", field="model"
            ) from None
        return None  # not an object, or with a field of our own names: the backend's to judge
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # a dialect of JSON, or none: the backend's to judge
    except RecursionError:
        raise MalformedRequestError(
            "the body is nested too deeply to look for its model; name it in x-phalanx-model"
        ) from None
    return body.model or body.model_name
