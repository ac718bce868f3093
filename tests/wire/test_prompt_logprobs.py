"""vLLM's extras on the OpenAI routes: log-probabilities of the prompt, tokens by id, its own forms."""

import msgspec
import pytest

from phalanx.errors import InvalidRequestError
from phalanx.schema.generate import Completion, GenerateOutput, Length, TokenLogprobs
from phalanx.wire.openai import (
    CompletionRenderer,
    CompletionShows,
    Header,
    PromptAnswer,
    TokenIdTexts,
    parse_chat,
    parse_completion,
)
from phalanx.wire.openai.prompt_logprobs import prompt_logprobs


class Texts:
    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d" % token_id


PROMPT = TokenLogprobs(
    token_ids=(5, 6, 7),
    values=(None, -1.0, -4.0),
    top=(None, ((-1.0, 6), (-2.0, 9), (-2.5, 4)), ((-0.5, 8), (-3.0, 3), (-3.5, 1))),
)
OUTPUT = TokenLogprobs(token_ids=(1,), values=(-3.5,), top=(((-0.5, 8), (-3.0, 3), (-3.25, 4)),))


def parsed(**fields: object):
    return parse_completion(msgspec.json.encode({"prompt": [5, 6, 7], **fields}))


def whole(**shows: object) -> dict:
    output = GenerateOutput(
        completions=(
            Completion(token_ids=(1,), text="a", finish_reason=Length(1), logprobs=OUTPUT),
        ),
        prompt_tokens=3,
        prompt_logprobs=PROMPT,
    )
    texts = TokenIdTexts(Texts()) if shows.get("with_own") else Texts()
    header = Header(id="i", model="m", created=1, texts=texts)
    renderer = CompletionRenderer(header, CompletionShows(**shows), num_completions=1)
    answer = PromptAnswer(prompt_ids=(5, 6, 7), output=output)
    (choice,) = msgspec.json.decode(renderer.whole([answer]))["choices"]
    return choice


def test_each_position_has_its_likeliest_tokens_and_its_own():
    first, second, third = prompt_logprobs(PROMPT, 2, Texts())
    assert first is None
    assert {one: (row.logprob, row.rank) for one, row in second.items()} == {
        "6": (-1.0, 1),
        "9": (-2.0, 2),
    }
    # The token itself is not among the two likeliest: it comes behind them.
    assert {one: (row.logprob, row.rank) for one, row in third.items()} == {
        "8": (-0.5, 1),
        "3": (-3.0, 2),
        "7": (-4.0, 3),
    }
    assert third["7"].decoded_token == "<7>"
    assert prompt_logprobs(PROMPT, 0, Texts())[1] == {"6": second["6"]}


def test_one_number_for_the_prompt_and_another_for_the_output():
    call = parsed(prompt_logprobs=2, logprobs=1)
    assert (call.logprobs.prompt_start, call.logprobs.top_k) == (0, 2)
    assert (call.num_top, call.num_prompt_top) == (1, 2)
    choice = whole(num_top=1, num_prompt_top=2)
    assert len(choice["prompt_logprobs"][1]) == 2
    assert choice["logprobs"]["top_logprobs"] == [{"<8>": -0.5}]
    assert choice["logprobs"]["tokens"] == ["<1>"]


def test_log_probabilities_of_the_prompt_alone():
    call = parsed(prompt_logprobs=0)
    assert (call.logprobs.prompt_start, call.logprobs.top_k, call.num_top) == (0, 0, None)
    choice = whole(num_prompt_top=0)
    assert choice["logprobs"] is None
    assert [row and list(row) for row in choice["prompt_logprobs"]] == [None, ["6"], ["7"]]


def test_without_them_nothing_is_shown():
    assert parsed().logprobs is None
    assert parsed(logprobs=1).logprobs.prompt_start is None
    choice = whole(num_top=1)
    assert "prompt_logprobs" not in choice
    assert whole(num_top=1, echo=True)["logprobs"]["tokens"] == ["<5>", "<6>", "<7>", "<1>"]


def test_tokens_by_id_have_their_own_among_the_likeliest():
    choice = whole(num_top=1, with_own=True)
    assert choice["logprobs"]["tokens"] == ["token_id:1"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:8": -0.5, "token_id:1": -3.5}]
    choice = whole(num_top=0, with_own=True)
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:1": -3.5}]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs=-1"),
        ({"prompt_logprobs": 300}, "prompt_logprobs", "must be from 0 to 256"),
        ({"prompt_logprobs": 1, "stream": True}, "stream", "stream=false"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs", "several"),
        ({"structured_outputs": {"regex": "a"}, "regex": "b"}, "structured_outputs", "regex"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"length_penalty": 2.0}, "length_penalty", "not supported"),
    ],
)
def test_what_is_refused_names_its_field(fields, field, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        parsed(**fields).sampling()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "no."]}, "regex", r"yes|no\."),
        ({"json": {"type": "array"}}, "json_schema", '{"type":"array"}'),
        ({"json": '{"type":"array"}'}, "json_schema", '{"type":"array"}'),
        ({"json_object": True}, "json_schema", '{"type":"object"}'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_structured_outputs_as_vllm_writes_them(given, name, value):
    sampling = parsed(structured_outputs=given).sampling()
    assert getattr(sampling, name) == value
    body = msgspec.json.encode(
        {"messages": [{"role": "user", "content": "a"}], "structured_outputs": given}
    )
    assert getattr(parse_chat(body).sampling(4), name) == value


def test_vllms_names_for_sampling():
    sampling = parsed(top_k=0, include_stop_str_in_output=True, stop="a").sampling()
    assert (sampling.top_k, sampling.no_stop_trim) == (-1, True)
    assert parsed(length_penalty=1.0, use_beam_search=False, bad_words=[]).sampling()
