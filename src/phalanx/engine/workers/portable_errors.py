"""A request's own error, in a form that every process can unpickle.

A plugin's exception class may pickle well and then not be built from what was pickled, which would
end all replicas for an error of one request.
"""

from __future__ import annotations

import traceback
from functools import partial

from phalanx import errors
from phalanx.engine.boundary import Raised, attempt
from phalanx.errors import InvalidRequestError, PhalanxError, RequestFailedError

_MAX_NOTE = 8_000
"""Characters of a cause's traceback that go along."""


def portable(error: Exception) -> PhalanxError:
    """An error with the same message, of the nearest class that this package defines.

    The `field` of an InvalidRequestError is kept. What else there is to know, the class and the
    cause, is in its notes.
    """
    text = attempt(partial(str, error))
    kind = _kind(type(error))
    found = kind(type(error).__name__ if isinstance(text, Raised) else text)
    field = vars(error).get("field")
    if isinstance(found, InvalidRequestError) and isinstance(field, str):
        found.field = field
    if type(error) is not kind:
        found.add_note(f"in the worker: {type(error).__module__}.{type(error).__qualname__}")
    if error.__cause__ is not None:
        trace = "".join(traceback.format_exception(error.__cause__))
        found.add_note(f"caused in the worker by:\n{trace[-_MAX_NOTE:]}".rstrip())
    return found


def _kind(of: type[Exception]) -> type[PhalanxError]:
    for each in of.__mro__:
        if issubclass(each, PhalanxError) and each.__module__ == errors.__name__:
            return each
    return RequestFailedError
