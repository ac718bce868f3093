"""What is said of keys in a configuration file that do not exist or hold the wrong kind of value."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import get_args, get_type_hints

import msgspec

from phalanx.errors import ConfigurationError


def check_keys(mapping: Mapping[object, object], record: type, source: str, path: str = "") -> None:
    """Refuse keys that `record`, a structure or dataclass, does not have; in nested ones too."""
    fields = _fields(record)
    for key, value in mapping.items():
        if key not in fields:
            raise unknown_key(str(key), tuple(fields), source, path)
        kind = fields[str(key)]
        if isinstance(kind, type) and is_record(kind) and isinstance(value, dict):
            check_keys(value, kind, source, f"{path}{key}.")


def check_choices(
    mapping: Mapping[object, object], record: type, source: str, path: str = ""
) -> None:
    """Refuse values of an enumeration's keys that it does not have, with those that it has; in
    nested records too.
    """
    fields = _fields(record)
    for key, value in mapping.items():
        for kind in (fields[str(key)], *get_args(fields[str(key)])):
            if not isinstance(kind, type):
                continue
            if is_record(kind) and isinstance(value, dict):
                check_choices(value, kind, source, f"{path}{key}.")
            elif issubclass(kind, enum.StrEnum) and value is not None and value not in list(kind):
                raise ConfigurationError(
                    f"{source}: {path}{key}={value!r} is not known; allowed: {', '.join(kind)}"
                )


def is_record(kind: type) -> bool:
    """Whether values of this type have fields by name."""
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)


def _fields(record: type) -> dict[str, object]:
    """The types of a record's fields by name."""
    hints = get_type_hints(record)
    if dataclasses.is_dataclass(record):
        return {field.name: hints[field.name] for field in dataclasses.fields(record)}
    assert issubclass(record, msgspec.Struct)
    return {name: hints[name] for name in record.__struct_fields__}


def unknown_key(key: str, allowed: tuple[str, ...], source: str, path: str) -> ConfigurationError:
    """The error for a key that is not one of `allowed`, with the nearest of them."""
    if not allowed:
        return ConfigurationError(f"{source}: unknown key {path}{key}; there are none to set here")
    nearest = difflib.get_close_matches(key, allowed, n=1, cutoff=0.0)[0]
    return ConfigurationError(
        f"{source}: unknown key {path}{key}; did you mean {path}{nearest}?"
        f" (allowed: {', '.join(allowed)})"
    )


def readable(error: msgspec.ValidationError, document: object = None) -> str:
    """msgspec's message, with the key in front in place of a JSON path at the end; and with the
    value, where `document` is what was converted, and a number, a text or a truth is there.
    """
    message, _, path = str(error).partition(" - at `")
    key = path.rstrip("`").removeprefix("$").removeprefix(".")
    if message.startswith("Expected"):
        message = message[:1].lower() + message[1:]
        value = _value_at(document, key)
        message += f" (it is {value!r})" if isinstance(value, str | int | float) else ""
    return f"{key}: {message}" if key else message


def _value_at(document: object, key: str) -> object:
    """None where nothing is there."""
    for part in filter(None, key.split(".")):
        document = document.get(part) if isinstance(document, dict) else None
    return document
