"""Builds a plugin's own arguments, a dataclass, from the plain values of a configuration file."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.schema.file_keys import check_keys, is_record, readable, unknown_key

A = TypeVar("A", bound=EntryArgs)


def build_plugin_args(args_cls: type[A], values: Mapping[str, object], source: str) -> A:
    """`args_cls(...)` from `values`, each converted to its field's type.

    Raises `ConfigurationError` for unknown and missing keys, values of the wrong type, and
    whatever the class itself refuses; `source` names where the values come from.
    """
    if not dataclasses.is_dataclass(args_cls):
        raise ConfigurationError(f"{args_cls.__qualname__} must be a dataclass to be configured")
    fields = {field.name: field for field in dataclasses.fields(args_cls) if field.init}
    for key in values:
        if key not in fields:
            raise unknown_key(key, tuple(fields), source, "plugin_args.")
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        keys = ", ".join(f"plugin_args.{name}" for name in missing)
        raise ConfigurationError(f"{source}: {keys} must be given")
    hints = get_type_hints(args_cls)
    converted = {
        name: _converted(value, hints[name], name, source) for name, value in values.items()
    }
    try:
        return args_cls(**converted)
    except ValueError as error:
        raise ConfigurationError(f"{source}: plugin_args: {error}") from error


def _converted(value: object, hint: object, name: str, source: str) -> object:
    where = f"{source}: plugin_args.{name}"
    kinds = _writable(hint)
    if not kinds:
        raise ConfigurationError(f"{where}: a function cannot be written in a file; leave it out")
    for kind in kinds:
        if isinstance(kind, type) and isinstance(value, dict) and is_record(kind):
            check_keys(value, kind, source, f"plugin_args.{name}.")
    try:
        return msgspec.convert(value, Union[kinds], dec_hook=_decode)  # noqa: UP007
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {readable(error)} (it is {value!r})") from None
    except NotImplementedError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _writable(hint: object) -> tuple[object, ...]:
    """The types of `hint` that a file's value can have: no functions, and no `Path` beside `str`,
    since such a value is a string."""
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return tuple(
        kind
        for kind in kinds
        if get_origin(kind) is not Callable
        and kind is not Callable
        and not (kind is Path and str in kinds)
    )


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"a value of type {kind.__name__} cannot be written in a file")
