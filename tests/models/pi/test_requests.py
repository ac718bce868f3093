"""Requests that can never be served are refused before they are queued, naming the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx import InvalidRequestError
from phalanx.models.pi.building import limits_of
from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi0.entry import PI0Entry
from phalanx.models.pi05.entry import PI05Entry
from tests.models.pi.stored import loaded, request, stored

NAME = "pi05_micro_f32"


@pytest.fixture(scope="module")
def limits():
    return limits_of(loaded(NAME).model, 2)


def with_nan(tensor):
    changed = tensor.clone()
    changed[1, 0, 0] = float("nan")
    return changed


GIVEN = request(NAME)
OLD = stored(NAME)["rtc.prev_chunk_left_over"]

CASES = {
    "too few cameras": ("pixel_values", GIVEN.pixel_values[:, :2], "(2, 3, 3, 28, 28)"),
    "another size": ("pixel_values", GIVEN.pixel_values[..., :27], "(2, 3, 3, 28, 28)"),
    "bytes": ("pixel_values", GIVEN.pixel_values.to(torch.uint8), "uint8"),
    "an array": ("pixel_values", GIVEN.pixel_values.numpy(), "ndarray"),
    "a pixel that is no number": ("pixel_values", with_nan(GIVEN.pixel_values), "not finite"),
    "ids of 32 bits": ("input_ids", GIVEN.input_ids.int(), "int64"),
    "a short prompt": ("input_ids", GIVEN.input_ids[:, :100], "(2, 200)"),
    "an unknown token": ("input_ids", GIVEN.input_ids + 300, "0 to 299"),
    "no tokens": ("lang_lens", torch.tensor([3, 0]), "lang_lens[1]=0"),
    "more tokens than there are": ("lang_lens", torch.tensor([201, 3]), "1 to 200"),
    "lens of other rows": ("lang_lens", torch.tensor([3]), "(2,)"),
    "noise of another chunk": ("noise", GIVEN.noise[:, :9], "(2, 10, 32)"),
    "noise that is no number": ("noise", with_nan(GIVEN.noise), "not finite"),
    "masks of numbers": ("image_masks", torch.ones(2, 3), "bool"),
    "masks of other cameras": ("image_masks", torch.ones(2, 2, dtype=torch.bool), "(2, 3)"),
    "no steps": ("num_steps", 0, "1 to 1000"),
    "half a step": ("num_steps", 2.5, "1 to 1000"),
    "a chunk that is too long": (
        "rtc.prev_chunk_left_over",
        RealTimeChunking(torch.zeros(2, 11, 7)),
        "at most 10",
    ),
    "a chunk of other rows": ("rtc.prev_chunk_left_over", RealTimeChunking(OLD[:1]), "(2, 8, 7)"),
    "a chunk that is no number": (
        "rtc.prev_chunk_left_over",
        RealTimeChunking(with_nan(OLD)),
        "not finite",
    ),
    "a delay below 0": ("rtc.inference_delay", RealTimeChunking(OLD, -1), "0 to 10"),
    "an unknown schedule": ("rtc.schedule", RealTimeChunking(OLD, schedule="SOFT"), "LINEAR"),
    "an unknown mode": ("rtc.mode", RealTimeChunking(OLD, mode="hard"), "guided, trained"),
    "endless guidance": (
        "rtc.max_guidance_weight",
        RealTimeChunking(OLD, max_guidance_weight=float("inf")),
        "finite",
    ),
    "no horizon": (
        "rtc.execution_horizon",
        RealTimeChunking(OLD, execution_horizon=0),
        "1 to 10",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_that_can_never_be_served(case, limits):
    field, value, said = CASES[case]
    changed = replace(GIVEN, **{field.partition(".")[0]: value})
    with pytest.raises(InvalidRequestError) as refused:
        PI05Entry.validate(changed, limits)
    assert refused.value.field == field
    assert field in str(refused.value) and said in str(refused.value)


def test_a_request_that_can_be_served(limits):
    PI05Entry.validate(GIVEN, limits)
    PI05Entry.validate(replace(GIVEN, noise=None, image_masks=None), limits)
    PI05Entry.validate(replace(GIVEN, pixel_values=GIVEN.pixel_values.double()), limits)


def test_r86_more_rows_than_the_batch_size_are_refused(limits):
    three = {
        name: torch.cat([getattr(GIVEN, name), getattr(GIVEN, name)[:1]])
        for name in ("pixel_values", "input_ids", "lang_lens", "noise", "image_masks")
    }
    with pytest.raises(InvalidRequestError, match="max_batch_size=2"):
        PI05Entry.validate(replace(GIVEN, **three), limits)


def test_the_state_of_pi0():
    limits, given = limits_of(loaded("pi0_tiny_f32").model, 2), request("pi0_tiny_f32")
    PI0Entry.validate(given, limits)
    for state, said in (
        (given.state[:, :8], "(2, 32)"),
        (given.state * float("inf"), "not finite"),
        (given.state.long(), "int64"),
    ):
        with pytest.raises(InvalidRequestError, match="state") as refused:
            PI0Entry.validate(replace(given, state=state), limits)
        assert refused.value.field == "state" and said in str(refused.value)
