"""The frame that an openpi client sends for each observation.

openpi's policies read keys of their own choice, nested or joined by slashes. Arrays of three
dimensions are images, named by what follows `observation/`, `images/` or both; `state` is the
robot's state, or joint and gripper positions are, one behind the other; `prompt` is the instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Observation
from phalanx.wire.arrays import listed
from phalanx.wire.msgpack_numpy import MAX_KEY_BYTES, unpack
from phalanx.wire.pictures import as_image, as_state, num_rows

_PREFIXES = ("observation/", "observation.", "images/", "images.")
_STATE = "state"
_STATE_PARTS = ("joint_position", "gripper_position")
_PROMPT = "prompt"
_SETTINGS = ("rtc",)
"""Maps that are no part of the observation, whatever they hold."""


def decode_observation(data: bytes) -> Observation:
    """The observation; whatever is none of the above is kept in `inputs` or `parameters`.

    Raises `MalformedRequestError` where the frame is not a map of MessagePack, and
    `InvalidRequestError` naming the key that cannot be used.
    """
    frame = unpack(data)
    if not isinstance(frame, dict):
        raise MalformedRequestError(
            f"the frame is {type(frame).__name__}; an observation is a map of names to values"
        )
    values = _flat(frame)
    images = _images(values)
    prompt = values.pop(_PROMPT, "")
    state = _state(values)
    rows = num_rows(images, state)
    return Observation(
        images=images,
        state=state,
        instructions=_instructions(prompt, rows),
        batched=rows is not None or isinstance(prompt, list),
        inputs={name: each for name, each in values.items() if isinstance(each, np.ndarray)},
        parameters=listed(
            {name: each for name, each in values.items() if not isinstance(each, np.ndarray)}
        ),
    )


def _flat(frame: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for path, value in _leaves(frame, ""):
        name = _short(path)
        if name in values:
            raise InvalidRequestError(f"{path!r} is there twice, as {name!r}", field=path)
        values[name] = value
    return values


def _leaves(frame: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
    for name, value in frame.items():
        # A part's name is in that of each of its values: the parts must not make it long.
        if len(path) + len(name) > MAX_KEY_BYTES:
            raise InvalidRequestError(
                f"the names from {path[:40]!r} to {name[:40]!r} have more than {MAX_KEY_BYTES} "
                "characters; give shorter ones",
                field=name[:40],
            )
        if isinstance(value, dict) and path + name not in _SETTINGS and _holds_arrays(value):
            yield from _leaves(value, f"{path}{name}/")
        else:
            yield path + name, value


def _holds_arrays(value: Mapping[str, object]) -> bool:
    """Whether this is a part of the observation; a map of settings is one value."""
    return any(
        isinstance(each, np.ndarray) or (isinstance(each, dict) and _holds_arrays(each))
        for each in value.values()
    )


def _short(path: str) -> str:
    short = path
    for prefix in _PREFIXES:
        if short.startswith(prefix) and len(short) > len(prefix):
            short = short[len(prefix) :]
    return short


def _images(values: dict[str, object]) -> dict[str, NDArray[np.uint8]]:
    names = [
        name
        for name, each in values.items()
        if isinstance(each, np.ndarray) and each.ndim in (3, 4)
    ]
    images = {}
    for name in names:
        array = values.pop(name)
        assert isinstance(array, np.ndarray)
        images[name] = as_image(array, name)
    return images


def _state(values: dict[str, object]) -> NDArray[np.float32] | None:
    if _STATE in values:
        return as_state(values.pop(_STATE), _STATE)
    parts = [as_state(values.pop(name), name) for name in _STATE_PARTS if name in values]
    if not parts:
        return None
    try:
        return np.concatenate([np.atleast_1d(part) for part in parts], axis=-1)
    except ValueError as error:
        raise InvalidRequestError(
            f"{' and '.join(_STATE_PARTS)} do not fit: {error}", field=_STATE_PARTS[0]
        ) from error


def _instructions(prompt: object, rows: int | None) -> tuple[str, ...]:
    if isinstance(prompt, bytes):
        prompt = prompt.decode("utf-8", "replace")
    if isinstance(prompt, str):
        return (prompt,) * (1 if rows is None else rows)
    if isinstance(prompt, list) and all(isinstance(each, str) for each in prompt):
        return tuple(prompt)
    raise InvalidRequestError(
        f"prompt is {type(prompt).__name__}; send a text, or a list of texts for a batch",
        field=_PROMPT,
    )
