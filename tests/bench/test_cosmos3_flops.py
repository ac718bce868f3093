"""How many operations Cosmos3 takes, against the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.bench.cosmos3_cases import (
    ON_DEVICE,
    media_flops,
    step_flops,
    text_flops,
    text_share,
)
from phalanx.bench.cosmos3_geometry import Geometry

NANO, SUPER = Geometry.nano(), Geometry.super()
CONTENT = replace(ON_DEVICE, height=352, width=640)
SHORT = replace(ON_DEVICE, frames=17, action_rows=16, prompt_tokens=160)
VIDEO = replace(
    ON_DEVICE, frames=189, height=720, width=1280, action_rows=0, prompt_tokens=512
)  # fmt: skip


@pytest.mark.parametrize(
    ("geometry", "case", "tokens", "media", "text"),
    [
        (NANO, ON_DEVICE, 3542, "56.8", "1.34"),
        (NANO, CONTENT, 2012, "30.5", "1.34"),
        (NANO, SHORT, 1966, "29.8", "2.24"),
        (SUPER, ON_DEVICE, 3542, "248", "6.0"),
        (NANO, VIDEO, 44160, "1777", "7.3"),
        (SUPER, VIDEO, 44160, "6893", "32.5"),
    ],
)
def test_operations_of_a_pass(geometry, case, tokens, media, text):
    assert case.num_tokens == tokens
    assert rounded(media_flops(geometry, case, case.prompt_tokens), media) == media
    assert rounded(text_flops(geometry, case.prompt_tokens), text) == text


def test_a_guided_step_has_two_branches():
    assert rounded(step_flops(NANO, ON_DEVICE), "113.6") == "113.6"
    whole = 4 * step_flops(NANO, ON_DEVICE) + 2 * text_flops(NANO, 96)
    assert abs(whole / 1e12 - 457.2) < 0.1
    assert 0 < text_share(NANO, ON_DEVICE) < 0.03


def rounded(flops: int, like: str) -> str:
    """In units of 10^12, with as many decimals."""
    return f"{flops / 1e12:.{len(like.partition('.')[2])}f}"
