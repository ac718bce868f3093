"""Sampling fields whose JSON form differs from the schema's, shared by the protocols."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import MalformedRequestError


def string_tuple(value: str | list[str]) -> tuple[str, ...]:
    """One string or a list of them."""
    return (value,) if isinstance(value, str) else tuple(value)


def bias_pairs(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """`logit_bias`, whose keys are token ids written as strings."""
    pairs: list[tuple[int, float]] = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()):
            raise MalformedRequestError(
                f"logit_bias key {key!r} must be a token id", field="logit_bias"
            )
        pairs.append((int(key), bias))
    return tuple(pairs)
