"""Says in OpenAI's names what the schema refuses in its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from phalanx.errors import InvalidRequestError

_SHOWN = re.compile(r"\b(\w+)=")


@contextmanager
def in_clients_names(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals that leave here name the fields of `names`, from the schema's to the client's.

    A value that a message shows as `name=value` gets the client's name too; the one at its
    beginning is that of the field at fault, whatever the schema calls it there.
    """
    try:
        yield
    except InvalidRequestError as error:
        field, message = names.get(error.field, error.field), str(error)
        first = _SHOWN.match(message)
        if first and error.field in names:
            message = field + message[first.end(1) :]
        message = _SHOWN.sub(lambda shown: f"{names.get(shown[1], shown[1])}=", message)
        raise type(error)(message, field=field) from error
