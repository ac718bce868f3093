"""Answers that are not exactly what was asked for: every one is refused, naming the sample."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from phalanx.distill import ScorerSettings, TeacherScorer
from phalanx.errors import ScoresMisalignedError
from tests.distill.making import ALL, FAST, sample
from tests.distill.toy_role import engine

UNION = ALL[3]
SETTINGS = ScorerSettings(asking=FAST)


def _cut_short(asked, answer):
    answer["meta_info"]["input_token_logprobs"].pop()


def _one_more(asked, answer):
    answer["meta_info"]["input_token_logprobs"].append([-1.0, 1, None])


def _other_token(asked, answer):
    answer["meta_info"]["input_token_logprobs"][2][1] ^= 1


def _no_number(asked, answer):
    answer["meta_info"]["input_token_logprobs"][2][0] = None


def _above_zero(asked, answer):
    answer["meta_info"]["input_token_logprobs"][2][0] = 0.5


def _no_logprobs(asked, answer):
    del answer["meta_info"]["input_token_logprobs"]


def _no_meta(asked, answer):
    del answer["meta_info"]


def _top_short(asked, answer):
    answer["meta_info"]["input_top_logprobs"][1].pop()


def _top_missing(asked, answer):
    del answer["meta_info"]["input_top_logprobs"]


def _top_twice(asked, answer):
    row = answer["meta_info"]["input_top_logprobs"][1]
    row[1] = row[0]


def _chosen_other(asked, answer):
    answer["meta_info"]["input_token_ids_logprobs"][1][0][1] += 1


def _chosen_rows_short(asked, answer):
    answer["meta_info"]["input_token_ids_logprobs"].pop()


SPOILERS = [
    _cut_short,
    _one_more,
    _other_token,
    _no_number,
    _above_zero,
    _no_logprobs,
    _no_meta,
    _top_short,
    _top_missing,
    _top_twice,
    _chosen_other,
    _chosen_rows_short,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_i102_what_is_not_exactly_that_is_refused(spoil):
    async def run():
        async with engine("teacher") as (toy, client):
            toy.spoil = spoil
            with pytest.raises(ScoresMisalignedError, match="g0/0"):
                await TeacherScorer(client, SETTINGS).score([sample(selection=UNION)])

    asyncio.run(run())


@pytest.mark.parametrize("name", ["input_token_logprobs", "input_top_logprobs"])
@pytest.mark.parametrize("how", ["short", "garbage", "nan"])
def test_i102_packed_columns_are_checked_likewise(name, how):
    def spoil(asked, answer):
        meta = answer["meta_info"]
        text = meta[f"{name}_val_b64"]
        values = np.frombuffer(base64.b64decode(text), "<f4").copy()
        values[-1] = np.nan
        changed = {
            "short": text[:-8],
            "garbage": "?" + text[1:],
            "nan": base64.b64encode(values.tobytes()).decode(),
        }
        meta[f"{name}_val_b64"] = changed[how]

    async def run():
        async with engine("teacher") as (toy, client):
            toy.packed, toy.spoil = True, spoil
            with pytest.raises(ScoresMisalignedError):
                await TeacherScorer(client, SETTINGS).score([sample(selection=UNION)])

    asyncio.run(run())
