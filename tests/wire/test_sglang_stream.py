"""Chunks of a `/generate` stream: cumulative, incremental, and equal to the whole at the end."""

import msgspec
import pytest

from phalanx.schema.generate import (
    Completion,
    GenerateDelta,
    GenerateOutput,
    Stop,
    TokenLogprobs,
)
from phalanx.wire.sglang import Rendering, StreamRenderer, render_output

PROMPT = TokenLogprobs(token_ids=(7, 8), values=(None, -1.0), top=(None, ((-0.5, 3),)))


def scores(*ids: int) -> TokenLogprobs:
    values = tuple(-0.1 * one for one in ids)
    return TokenLogprobs(token_ids=ids, values=values, top=tuple(((value, 1),) for value in values))


DELTAS = [
    GenerateDelta(token_ids=(1,), text="a", logprobs=scores(1), prompt_logprobs=PROMPT),
    GenerateDelta(token_ids=(2, 3), text="bc", logprobs=scores(2, 3)),
    GenerateDelta(token_ids=(4,), text="", logprobs=scores(4), finish_reason=Stop(4)),
]
OUTPUT = GenerateOutput(
    completions=(
        Completion(
            token_ids=(1, 2, 3, 4), text="abc", finish_reason=Stop(4), logprobs=scores(1, 2, 3, 4)
        ),
    ),
    prompt_tokens=2,
    cached_tokens=1,
    num_retractions=2,
    prompt_logprobs=PROMPT,
)
RENDERING = Rendering(
    rid="r", prompt_ids=(7, 8), logprobs=True, top=True, token_text=lambda one: f"t{one}"
)


def chunks(renderer: StreamRenderer) -> list[dict]:
    lines = [renderer.chunk(delta, None, 0.5) for delta in DELTAS[:-1]]
    lines.append(renderer.chunk(DELTAS[-1], OUTPUT, 1.0))
    assert all(line.startswith(b"data: ") and line.endswith(b"\n\n") for line in lines)
    return [msgspec.json.decode(line[6:-2]) for line in lines]


def test_cumulative():
    first, second, last = chunks(StreamRenderer(RENDERING))
    assert [one["text"] for one in (first, second, last)] == ["a", "abc", "abc"]
    assert [one["output_ids"] for one in (first, second, last)] == [[1], [1, 2, 3], [1, 2, 3, 4]]
    for one in (first, second, last):
        assert one["meta_info"]["input_token_logprobs"] == [[None, 7, "t7"], [-1.0, 8, "t8"]]
        assert one["meta_info"]["output_token_logprobs_length"] == len(one["output_ids"])
        assert len(one["meta_info"]["output_top_logprobs"]) == len(one["output_ids"])
    assert first["meta_info"]["finish_reason"] is None
    assert "e2e_latency" not in first["meta_info"]
    assert "index" not in last


def test_last_cumulative_chunk_is_the_whole_answer():
    (whole,) = render_output(OUTPUT, RENDERING, 1.0)
    assert chunks(StreamRenderer(RENDERING))[-1] == msgspec.json.decode(msgspec.json.encode(whole))


def test_incremental():
    first, second, last = chunks(StreamRenderer(RENDERING, incremental=True))
    assert [one["text"] for one in (first, second, last)] == ["a", "bc", ""]
    assert [one["output_ids"] for one in (first, second, last)] == [[1], [2, 3], [4]]
    lengths = [one["meta_info"]["output_token_logprobs_length"] for one in (first, second, last)]
    assert lengths == [1, 3, 4]
    assert len(first["meta_info"]["input_token_logprobs"]) == 2
    assert "input_token_logprobs" not in second["meta_info"]
    assert last["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("incremental", [False, True])
def test_completions_are_kept_apart(incremental):
    rendering = Rendering(rid="r", prompt_ids=(7,), num_completions=2)
    renderer = StreamRenderer(rendering, incremental=incremental, first_index=4)
    lines = [
        renderer.chunk(GenerateDelta(index=at, token_ids=(at,), text=f"{at}"), None, 0.0)
        for at in (0, 1)
    ]
    shown = [msgspec.json.decode(line[6:-2]) for line in lines]
    assert [(one["index"], one["text"], one["meta_info"]["id"]) for one in shown] == [
        (4, "0", "r_0"),
        (5, "1", "r_1"),
    ]


def test_without_logprobs_there_are_no_such_fields():
    rendering = Rendering(rid="r", prompt_ids=(7, 8), prompt_token_ids=True)
    (whole,) = render_output(OUTPUT, rendering, 1.0)
    answer = msgspec.to_builtins(whole)
    assert not [name for name in answer["meta_info"] if "logprobs" in name]
    assert answer["prompt_token_ids"] == (7, 8)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 4}
