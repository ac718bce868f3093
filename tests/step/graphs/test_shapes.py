"""Which shapes are captured, and which one a batch gets."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.shapes import Shapes
from tests.step.graphs.nodes import NODE, WALK, Bench, Doubler


def test_batched_shapes_have_equally_many_tokens_a_row_and_come_largest_first():
    config = CaptureConfig(WALK, Shapes(rows=(1, 4, 2), row_tokens=3), key="k")
    assert [(one.rows, one.tokens) for one in config.buckets()] == [(4, 12), (2, 6), (1, 3)]
    assert {(one.walk, one.key, one.packed) for one in config.buckets()} == {(WALK, "k", False)}
    assert (config.shapes.max_rows, config.shapes.max_tokens) == (4, 12)


def test_packed_shapes_are_all_pairs():
    config = CaptureConfig(WALK, Shapes(rows=(1, 2), token_buckets=(4, 8)))
    assert [(one.rows, one.tokens) for one in config.buckets()] == [(2, 8), (2, 4), (1, 8), (1, 4)]
    assert all(one.packed for one in config.buckets())


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ()},
        {"rows": (0, 1)},
        {"rows": (2, 2)},
        {"row_tokens": 0},
        {"token_buckets": (4, 4)},
        {"token_buckets": (-1,)},
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="of a capture; give"):
        Shapes(**wrong)


@pytest.fixture(scope="module")
def bench() -> Bench:
    node = Doubler(
        CaptureConfig(WALK, Shapes(rows=(1, 2, 8)), aliases=("twice",)),
        CaptureConfig("pack", Shapes(rows=(2, 4), token_buckets=(4, 16))),
        CaptureConfig("pack", Shapes(rows=(3,), row_tokens=2), key="k"),
        CaptureConfig("free", Shapes(rows=(5,)), caps_eager_batch_size=False),
    )
    node.input_size = lambda rows, tokens: rows
    return Bench(node)


def leased(bench: Bench, walk: str, spans: list[int], *, prepared: bool, key=None):
    graphs = bench.engine._nodes[NODE].graphs._graphs
    bucket = graphs.bucket_of(walk, key, spans, prepared=prepared)
    return None if bucket is None else (bucket.walk, bucket.rows, bucket.tokens)


@pytest.mark.parametrize(
    ("walk", "spans", "expected"),
    [
        (WALK, [1], (WALK, 1, 1)),
        (WALK, [1] * 3, (WALK, 8, 8)),
        (WALK, [1] * 9, None),
        (WALK, [2], None),
        ("twice", [1, 1], (WALK, 2, 2)),
        ("pack", [3, 1], ("pack", 2, 4)),
        ("pack", [1] * 3, ("pack", 4, 4)),
        ("pack", [3, 2], ("pack", 2, 16)),
        ("pack", [17], None),
        ("none", [1], None),
    ],
)
def test_a_batch_gets_the_shape_with_the_fewest_tokens_then_rows(bench, walk, spans, expected):
    assert leased(bench, walk, spans, prepared=True) == expected


def test_before_inputs_are_prepared_only_batched_shapes_answer(bench):
    assert leased(bench, "pack", [1, 1], prepared=False) is None
    assert leased(bench, WALK, [1, 1], prepared=False) == (WALK, 2, 2)


def test_another_key_is_another_capture(bench):
    assert leased(bench, "pack", [2, 2], prepared=True, key="k") == ("pack", 3, 6)
    assert leased(bench, "pack", [2, 2], prepared=True, key="other") is None
    assert leased(bench, WALK, [1], prepared=True, key="k") is None


def test_captures_cap_a_step_where_they_say_so(bench):
    assert bench.engine.get_max_batch_size(NODE, WALK) == 8
    assert bench.engine.get_max_batch_size(NODE, "twice") == 8
    assert bench.engine.get_max_batch_size(NODE, "pack") == 4
    assert bench.engine.get_max_batch_size(NODE, "free") is None
    bench.node.limit = 6
    assert bench.engine.get_max_batch_size(NODE, WALK) == 6
    assert bench.engine.get_max_batch_size(NODE, "free") == 6
    bench.node.limit = None
