"""Both envelopes of `POST /v1/actions/generations` to an `Observation`.

Flat: `{model_name | model, observation, metadata, requested_action_horizon}`. RLinf's:
`{model_name | model, input, parameters, runtime}`, whose `input` is, or holds, the observation.
`metadata` and `runtime` are the caller's own notes and change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Observation
from phalanx.wire.arrays import listed
from phalanx.wire.msgpack_numpy import unpack
from phalanx.wire.pictures import MAX_IMAGES, as_image, as_state, num_rows

MEDIA_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
MAX_HORIZON = (1 << 32) - 1

_MODEL = ("model_name", "model")
_HORIZON = "requested_action_horizon"
_FLAT = frozenset({*_MODEL, "observation", "metadata", "parameters", _HORIZON})
_RLINF = frozenset({*_MODEL, "input", "parameters", "runtime", _HORIZON})
_CAMERAS = ("main_images", "wrist_images")
_EXTRA = "extra_view_images"
_STATES, _TASKS = "states", "task_descriptions"
_OBSERVATION = frozenset({*_CAMERAS, _EXTRA, _STATES, _TASKS})
_BATCHED_DIMENSIONS = 4


class Envelope(enum.Enum):
    """The form of a request, in which it is answered."""

    FLAT = enum.auto()
    RLINF = enum.auto()


@dataclass(frozen=True, eq=False)
class ActionsCall:
    """`model_name` is "" where the request names none."""

    model_name: str
    observation: Observation
    envelope: Envelope


def decode_actions_request(body: bytes) -> ActionsCall:
    """The call. A single observation, without a dimension for rows, is a batch of one.

    Raises `MalformedRequestError` where the body is not a map of MessagePack, and
    `InvalidRequestError` naming the field where its content cannot be used.
    """
    call = unpack(body)
    if not isinstance(call, dict):
        raise MalformedRequestError(f"the body is {type(call).__name__}; send a map")
    envelope = Envelope.RLINF if "input" in call else Envelope.FLAT
    _refuse_unknown(call, _RLINF if envelope is Envelope.RLINF else _FLAT, "")
    parameters = listed(_mapping(call.get("parameters") or {}, "parameters"))
    horizon = call.get(_HORIZON, parameters.pop(_HORIZON, None))
    name = "input" if envelope is Envelope.RLINF else "observation"
    fields = _mapping(call.get(name), name)
    if set(fields) == {"observation"}:
        fields = _mapping(fields["observation"], f"{name}.observation")
    return ActionsCall(
        _model_name(call), _observation(fields, name, _horizon(horizon), parameters), envelope
    )


def _model_name(call: Mapping[str, object]) -> str:
    names = {call[key] for key in _MODEL if isinstance(call.get(key), str)}
    wrong = [key for key in _MODEL if not isinstance(call.get(key, ""), str)]
    if wrong or len(names) > 1:
        raise InvalidRequestError(
            f"{' and '.join(wrong or _MODEL)} must be one text", field=(wrong or _MODEL)[0]
        )
    return str(names.pop()) if names else ""


def _mapping(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        what = "missing" if value is None else type(value).__name__
        raise InvalidRequestError(f"{path} is {what}; send a map", field=path)
    return value


def _refuse_unknown(fields: Mapping[str, object], known: frozenset[str], path: str) -> None:
    unknown = sorted(set(fields) - known)
    if unknown:
        raise InvalidRequestError(
            f"unknown field {path + unknown[0]!r}; allowed: {', '.join(sorted(known))}",
            field=path + unknown[0],
        )


def _horizon(value: object) -> int | None:
    if value is None or value == 0:
        return None
    if type(value) is not int or not 0 < value <= MAX_HORIZON:
        raise InvalidRequestError(
            f"{_HORIZON}={value!r:.40} must be a positive integer, or 0 for all", field=_HORIZON
        )
    return value


def _observation(
    fields: Mapping[str, object],
    path: str,
    horizon: int | None,
    parameters: Mapping[str, object],
) -> Observation:
    _refuse_unknown(fields, _OBSERVATION, f"{path}.")
    images = _images(fields)
    state = None
    if fields.get(_STATES) is not None:
        state = as_state(fields[_STATES], _STATES)
        state = state if state.ndim > 1 else np.atleast_2d(state)
    tasks = _tasks(fields.get(_TASKS))
    rows = num_rows(images, state)
    rows = len(tasks) if rows is None else rows
    return Observation(
        images=images,
        state=state,
        instructions=tasks * rows if len(tasks) == 1 else tasks,
        batched=True,
        horizon=horizon,
        parameters=parameters,
    )


def _images(fields: Mapping[str, object]) -> dict[str, NDArray[np.uint8]]:
    images = {
        name: _rows_of(_array(fields[name], name), name)
        for name in _CAMERAS
        if fields.get(name) is not None
    }
    extra = fields.get(_EXTRA)
    if extra is not None:
        images.update(_extra_images(extra))
    return images


def _extra_images(extra: object) -> dict[str, NDArray[np.uint8]]:
    """By name where it is a map; else the views of (B, views, H, W, C), numbered."""
    if isinstance(extra, dict):
        return {name: _rows_of(_array(each, name), name) for name, each in extra.items()}
    views = _array(extra, _EXTRA)
    if views.ndim == _BATCHED_DIMENSIONS:
        return {_EXTRA: _rows_of(views, _EXTRA)}
    if views.ndim != _BATCHED_DIMENSIONS + 1:
        raise InvalidRequestError(
            f"{_EXTRA} has shape {views.shape}; send (B, views, H, W, C)", field=_EXTRA
        )
    if views.shape[1] > MAX_IMAGES:
        raise InvalidRequestError(
            f"{_EXTRA} has {views.shape[1]} views; at most {MAX_IMAGES} are taken", field=_EXTRA
        )
    names = [f"{_EXTRA}_{index}" for index in range(views.shape[1])]
    return {name: _rows_of(views[:, index], name) for index, name in enumerate(names)}


def _array(value: object, name: str) -> NDArray[np.generic]:
    if not isinstance(value, np.ndarray):
        raise InvalidRequestError(
            f"{name} is {type(value).__name__}; send an array of shape (B, H, W, C)", field=name
        )
    return value


def _rows_of(array: NDArray[np.generic], name: str) -> NDArray[np.uint8]:
    image = as_image(array, name)
    return image[None] if image.ndim == _BATCHED_DIMENSIONS - 1 else image


def _tasks(value: object) -> tuple[str, ...]:
    if value is None:
        return ("",)
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise InvalidRequestError(
        f"{_TASKS} must be a text, or a list of one text for each row", field=_TASKS
    )
