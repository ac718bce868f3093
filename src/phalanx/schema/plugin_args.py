"""Builds a plugin's own arguments, a dataclass, from the plain values of a configuration file."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.schema.file_keys import readable, unknown_key

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
        name: _converted(value, hints[name], f"{source}: plugin_args.{name}")
        for name, value in values.items()
    }
    try:
        return args_cls(**converted)
    except ValueError as error:
        raise ConfigurationError(f"{source}: plugin_args: {error}") from error


def _converted(value: object, hint: object, where: str) -> object:
    try:
        return msgspec.convert(value, _plain(hint), dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {readable(error)} (it is {value!r})") from None
    except NotImplementedError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _plain(hint: object) -> object:
    """`hint` without a `Path` that stands beside `str`: a file's value for it is a string."""
    if get_origin(hint) in (types.UnionType, Union) and str in get_args(hint):
        return Union[tuple(kind for kind in get_args(hint) if kind is not Path)]  # noqa: UP007
    return hint


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"a value of type {kind.__name__} cannot be written in a file")
