"""A plan addresses exactly the tokens of its rows, however they lie in the pages."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Segment
from phalanx.step.resources.cache_stream import CacheStream
from phalanx.step.resources.kv_plan import build_plans
from phalanx.step.resources.kv_step import KVStep

PAGE = 4


def stream(pages: list[int], stored_len: int) -> CacheStream:
    made = CacheStream()
    made.append(pages)
    made.stored_len = stored_len
    return made


def planned(rows: list[tuple[str, int]], streams: dict[str, CacheStream]):
    segments = [Segment(rid, span) for rid, span in rows]
    by_rid = {rid: {"main": one} for rid, one in streams.items()}
    plans = build_plans(KVStep(tuple(segments)), by_rid, PAGE, CpuBackend())
    return plans, plans.by_label["main"]


def test_the_arrays_of_a_mixed_step():
    streams = {"a": stream([7, 3], 5), "b": stream([2, 9, 4, 5], 3), "c": stream([6], 0)}
    plans, plan = planned([("a", 1), ("c", 1), ("b", 6)], streams)
    assert plan.slots.tolist() == [13, 24, 11, 36, 37, 38, 39, 16]
    assert plan.query_starts.tolist() == [0, 1, 2, 8]
    assert plan.page_table.tolist() == [[7, 3, 0], [6, 0, 0], [2, 9, 4]]
    assert plan.kv_lens.tolist() == [6, 1, 9]
    assert plan.spans == (1, 1, 6)
    assert plan.lens == (6, 1, 9)
    assert plan.num_single == 2
    assert plans.starts["main"] == (5, 0, 3)
    assert plan.slots.dtype == torch.int64
    assert {plan.query_starts.dtype, plan.page_table.dtype, plan.kv_lens.dtype} == {torch.int32}


def test_surplus_pages_never_look_like_context():
    _, plan = planned([("a", 1)], {"a": stream([7, 3, 8, 9], 3)})
    assert plan.page_table.tolist() == [[7]]


def test_single_rows_count_only_from_the_front():
    streams = {rid: stream([index + 1], 0) for index, rid in enumerate("abc")}
    assert planned([("a", 2), ("b", 1), ("c", 1)], streams)[1].num_single == 0
    assert planned([("a", 1), ("b", 2), ("c", 1)], streams)[1].num_single == 1


def test_an_empty_row_has_a_table_of_the_sink():
    _, plan = planned([("a", 0)], {"a": stream([], 0)})
    assert plan.page_table.tolist() == [[0]]
    assert plan.kv_lens.tolist() == [0]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 9)), min_size=1, max_size=5), st.data()
)
def test_tokens_land_behind_those_that_are_stored(sizes, data):
    pages = data.draw(st.permutations(range(1, 60)))
    streams, rows, at = {}, [], 0
    for index, (held, span) in enumerate(sizes):
        count = -(-(held + span) // PAGE)
        streams[str(index)] = stream(list(pages[at : at + count]), held)
        rows.append((str(index), span))
        at += count
    _, plan = planned(rows, streams)
    expected = [
        int(streams[rid].pages[token // PAGE]) * PAGE + token % PAGE
        for rid, span in rows
        for token in range(streams[rid].stored_len, streams[rid].stored_len + span)
    ]
    assert plan.slots.tolist() == expected
    for row, (rid, span) in enumerate(rows):
        length = streams[rid].stored_len + span
        table = plan.page_table[row].tolist()
        count = -(-length // PAGE)
        assert table[:count] == streams[rid].pages[:count].tolist()
        assert set(table[count:]) <= {0}


def test_a_step_says_whether_its_new_tokens_see_later_ones():
    streams = {"a": {"main": stream([3], 1)}}
    for causal in (True, False):
        step = KVStep((Segment("a", 2),), causal=causal)
        assert build_plans(step, streams, PAGE, CpuBackend()).by_label["main"].causal is causal
