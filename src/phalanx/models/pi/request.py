"""What pi policies are asked, beside their own parts: fields, and what makes them impossible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.layers.real_time_chunking import Schedule
from phalanx.schema.limits import Limits

RTC_MODES = ("guided", "trained")
MAX_STEPS = 1000


@dataclass(frozen=True, eq=False)
class RealTimeChunking:
    """Binds new actions to what is left of the chunk before them (LeRobot's names and units).

    `prev_chunk_left_over`: float (B, n, a), normalized actions that were not executed yet when the
    observation was made. `inference_delay` of them will have been executed when the new chunk is
    there. `mode` guided: actions up to `execution_horizon` (None: LeRobot's 10) are drawn towards
    them, by `schedule`, at most `max_guidance_weight` strong. `mode` trained, for checkpoints
    trained with it: the first `inference_delay` actions are those of the old chunk.
    """

    prev_chunk_left_over: Tensor
    inference_delay: int = 0
    execution_horizon: int | None = None
    mode: str = "guided"
    schedule: str = "LINEAR"
    max_guidance_weight: float = 10.0


class PiRequest(Protocol):
    """What every pi policy takes.

    `pixel_values`: float (B, cameras, 3, S, S) in [-1, 1]. `input_ids`: int64 (B, L), padded on the
    right. `lang_lens`: int64 (B,), tokens that are no padding. `noise`: float (B, chunk, actions)
    to begin with, None to draw it. `image_masks`: bool (B, cameras), False for a camera that is not
    there. `num_steps`: Euler steps, None for the checkpoint's own number.
    """

    @property
    def pixel_values(self) -> Tensor: ...
    @property
    def input_ids(self) -> Tensor: ...
    @property
    def lang_lens(self) -> Tensor: ...
    @property
    def noise(self) -> Tensor | None: ...
    @property
    def image_masks(self) -> Tensor | None: ...
    @property
    def num_steps(self) -> int | None: ...
    @property
    def rtc(self) -> RealTimeChunking | None: ...


def check_pi_request(request: PiRequest, limits: Limits) -> None:
    """Refuse what can never be served, naming the field."""
    shapes = limits.row_shapes
    assert shapes is not None
    rows = _check_rows(request, limits)
    pixels = request.pixel_values
    check_tensor(pixels, "pixel_values", (rows, *shapes["pixel_values"]), "a float", floating=True)
    check_tensor(request.input_ids, "input_ids", (rows, *shapes["input_ids"]), "int64")
    check_tensor(request.lang_lens, "lang_lens", (rows,), "int64")
    if request.image_masks is not None:
        check_tensor(
            request.image_masks, "image_masks", (rows, pixels.shape[1]), "bool", kind=torch.bool
        )
    if request.noise is not None:
        check_tensor(request.noise, "noise", (rows, *shapes["noise"]), "a float", floating=True)
    _check_tokens(request, limits)
    _check_steps(request.num_steps)
    if request.rtc is not None:
        _check_rtc(request.rtc, rows, shapes["noise"])


def check_state(state: Tensor, rows: int, limits: Limits) -> None:
    """Refuse a state of another shape, or with numbers that are not finite."""
    shapes = limits.row_shapes
    assert shapes is not None
    check_tensor(state, "state", (rows, *shapes["state"]), "a float", floating=True)


def _check_rows(request: PiRequest, limits: Limits) -> int:
    required = {
        "pixel_values": request.pixel_values,
        "input_ids": request.input_ids,
        "lang_lens": request.lang_lens,
    }
    for name, value in required.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            what = "a scalar" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidRequestError(
                f"{name} is {what}; give a tensor with one row for each observation", field=name
            )
    rows = len(request.input_ids)
    most = limits.max_batch_size
    assert most is not None
    if not 1 <= rows <= most:
        raise InvalidRequestError(
            f"input_ids has {rows} rows; this policy takes 1 to max_batch_size={most} in one "
            "request: split the batch, or raise max_batch_size",
            field="input_ids",
        )
    return rows


def check_tensor(
    value: Tensor,
    field: str,
    shape: tuple[int, ...],
    dtype: str,
    *,
    floating: bool = False,
    kind: torch.dtype = torch.int64,
) -> None:
    if not isinstance(value, Tensor):
        raise InvalidRequestError(
            f"{field} is {type(value).__name__}; give a tensor of shape {shape}", field=field
        )
    if not (value.is_floating_point() if floating else value.dtype == kind):
        raise InvalidRequestError(f"{field} is {value.dtype}; give {dtype} tensor", field=field)
    if tuple(value.shape) != shape:
        raise InvalidRequestError(
            f"{field} has shape {tuple(value.shape)}; this policy takes {shape}", field=field
        )
    if floating and not bool(torch.isfinite(value).all()):
        bad = (~torch.isfinite(value)).nonzero()[0].tolist()
        raise InvalidRequestError(
            f"{field} is not finite at index {bad} ({value[tuple(bad)].item()}); send finite "
            "numbers",
            field=field,
        )


def _check_tokens(request: PiRequest, limits: Limits) -> None:
    ids, lens = request.input_ids.cpu(), request.lang_lens.cpu()
    longest, vocabulary = ids.shape[1], limits.vocab_size
    assert vocabulary is not None
    for row, length in enumerate(lens.tolist()):
        if not 1 <= length <= longest:
            raise InvalidRequestError(
                f"lang_lens[{row}]={length}; a prompt has 1 to {longest} tokens", field="lang_lens"
            )
        used = ids[row, :length]
        low, high = int(used.min()), int(used.max())
        if low < 0 or high >= vocabulary:
            raise InvalidRequestError(
                f"input_ids[{row}] holds {low if low < 0 else high}; token ids are integers from 0 "
                f"to {vocabulary - 1}",
                field="input_ids",
            )


def _check_steps(num_steps: int | None) -> None:
    if num_steps is None:
        return
    whole = isinstance(num_steps, int) and not isinstance(num_steps, bool)
    if not whole or not 1 <= num_steps <= MAX_STEPS:
        raise InvalidRequestError(
            f"num_steps={num_steps!r} must be an integer from 1 to {MAX_STEPS}", field="num_steps"
        )


def _check_rtc(rtc: RealTimeChunking, rows: int, chunk_shape: tuple[int, ...]) -> None:
    chunk, actions = chunk_shape
    old = rtc.prev_chunk_left_over
    field = "rtc.prev_chunk_left_over"
    if not isinstance(old, Tensor) or old.dim() != 3:
        raise InvalidRequestError(f"{field} must be a tensor of shape (B, n, actions)", field=field)
    if not (1 <= old.shape[1] <= chunk and 1 <= old.shape[2] <= actions):
        raise InvalidRequestError(
            f"{field} has shape {tuple(old.shape)}; give at most {chunk} actions of at most "
            f"{actions} numbers a row",
            field=field,
        )
    check_tensor(old, field, (rows, *old.shape[1:]), "a float", floating=True)
    _check_choice("rtc.mode", rtc.mode, RTC_MODES)
    _check_choice("rtc.schedule", rtc.schedule, tuple(one.value for one in Schedule))
    for name, value in (
        ("inference_delay", rtc.inference_delay),
        ("execution_horizon", rtc.execution_horizon),
    ):
        least = 0 if name == "inference_delay" else 1
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and least <= value <= chunk):
            raise InvalidRequestError(
                f"rtc.{name}={value!r} must be an integer from {least} to {chunk}",
                field=f"rtc.{name}",
            )
    most = rtc.max_guidance_weight
    if isinstance(most, bool) or not isinstance(most, int | float) or not 0 <= most < float("inf"):
        raise InvalidRequestError(
            f"rtc.max_guidance_weight={most!r} must be a finite number of at least 0",
            field="rtc.max_guidance_weight",
        )


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequestError(f"{field}={value!r}; allowed: {', '.join(allowed)}", field=field)
