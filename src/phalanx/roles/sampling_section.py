"""Checks `sampling` of a model in `roles.yaml`: a judge's sampling parameters, as `/generate` has them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.schema.file_keys import readable, unknown_key
from phalanx.wire.sglang.body import UNSUPPORTED_SAMPLING, SamplingBody
from phalanx.wire.sglang.request import sampling_params

_IN_CHATS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""Names of chat completions, which are what the gateway sends, and so are taken as well."""
_NO_LIMIT = 2**31 - 1


def check_sampling(values: Mapping[str, object], source: str, path: str) -> None:
    """Raise `ConfigurationError` for a name or value that is no sampling parameter's.

    `path` is where in the file `values` are.
    """
    given: dict[str, object] = {}
    for name, value in values.items():
        own = _IN_CHATS.get(name, name)
        if own not in SamplingBody.__struct_fields__:
            raise unknown_key(str(name), SamplingBody.__struct_fields__, source, f"{path}.")
        if own in given:
            raise ConfigurationError(f"{source}: {path} has {own} twice, by two names; give one")
        if own not in UNSUPPORTED_SAMPLING:  # another engine may know what to do with those
            given[own] = value
    if given.get("max_new_tokens") is None:
        given["max_new_tokens"] = _NO_LIMIT  # callers may give one that fits the least
    try:
        sampling_params(msgspec.convert(given, SamplingBody))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{source}: {path}.{readable(error)}") from None
    except InvalidRequestError as error:
        raise ConfigurationError(f"{source}: {path}.{error.field}: {error}") from None
