"""A part of a job's file as the value that its keys describe."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.schema.file_keys import check_choices, check_keys, readable

T = TypeVar("T")


def file_section(value: object, kind: type[T], source: str, path: str) -> T:
    """`value` as a section of the file `source`, which is at `path` in it. Raises
    `ConfigurationError`.
    """
    if not isinstance(value, dict):
        raise ConfigurationError(f"{source}: {path} must hold keys of its own")
    prefix = f"{path}." if path else ""
    check_keys(value, kind, source, prefix)
    check_choices(value, kind, source, prefix)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = readable(error, value)
        # What is missing is no key that stands there.
        place = f"{path}: " if path and message.startswith("Object missing") else prefix
        raise ConfigurationError(f"{source}: {place}{message}") from None
