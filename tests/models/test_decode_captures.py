"""Which decode steps are captured, by how long their requests may become."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phalanx.models.causal_lm.decode_captures import DecodeCaptures, DecodeKey
from phalanx.schema.sampling import SamplingParams


def captures(max_rows: int = 8, context_length: int = 5000, pool_tokens: int = 8192):
    return DecodeCaptures(max_rows, context_length, pool_tokens, torch.device("cpu"))


def row(prompt_tokens: int, new_tokens: int):
    state = SimpleNamespace(
        constrained=False,
        scores=SimpleNamespace(options=None),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=new_tokens),
        prompt_ids=range(prompt_tokens),
    )
    return SimpleNamespace(span=1, info=SimpleNamespace(state=state))


def rows_by_context(made: DecodeCaptures) -> dict[int, tuple[int, ...]]:
    return {config.key.max_context: config.shapes.rows for config in made.configs()}


@pytest.mark.parametrize(
    ("tokens", "context"), [(1024, 1024), (1025, 2048), (2049, 4096), (4097, 5000), (5000, 5000)]
)
def test_a_step_looks_at_no_more_than_twice_what_its_longest_row_may_have(tokens, context):
    rows = [row(10, 10), row(tokens - 10, 10)]
    assert captures().key(rows) == DecodeKey(greedy=True, max_context=context)


def test_shapes_that_gather_far_more_than_the_cache_holds_are_left_out():
    assert rows_by_context(captures()) == {
        1024: (1, 2, 4, 8),
        2048: (1, 2, 4, 8),
        4096: (1, 2, 4),
        5000: (1, 2),
    }


@pytest.mark.parametrize("context_length", [64, 1024])
def test_a_short_context_is_the_only_one(context_length):
    made = captures(3, context_length, context_length)
    assert rows_by_context(made) == {context_length: (1, 2)}
