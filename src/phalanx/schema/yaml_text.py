"""Reads YAML by the rules of YAML 1.2: only `true` and `false` are booleans (`off` is a word),
`1e-5` is a number, and a key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from phalanx.errors import ConfigurationError

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_REPLACED = {_BOOL, _FLOAT, "tag:yaml.org,2002:timestamp"}


class _Loader(yaml.SafeLoader):
    """A safe loader with a table of resolvers of its own."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class keeps its table here
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
        r"|^\.(?:nan|NaN|NAN)$"
    ),
    "-+0123456789.",
)


def parse_yaml(text: str, source: str) -> object:
    """The document in `text`; `source` names it in errors."""
    try:
        document: object = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigurationError(f"{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source} is not YAML: {error}") from None
    return document
