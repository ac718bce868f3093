"""OpenAI bodies and answers, without a server."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.generate import (
    Abort,
    Completion,
    GenerateDelta,
    GenerateOutput,
    Length,
    LogprobOptions,
)
from phalanx.wire.openai import (
    ChatRenderer,
    Header,
    PromptAnswer,
    error_body,
    parse_chat,
    parse_completion,
)
from phalanx.wire.openai.chat import ChatBody

ASK = [{"role": "user", "content": "hi"}]


class Texts:
    def token_text(self, token_id: int) -> str:
        return f"t{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return b"t%d" % token_id


def chat(**body: object):
    return parse_chat(msgspec.json.encode({"messages": ASK, **body}))


def test_chat_defaults_are_openais():
    call = chat()
    sampling = call.sampling(100)
    assert (sampling.temperature, sampling.max_new_tokens, sampling.n) == (1.0, 100, 1)
    assert call.max_tokens is None
    assert call.logprobs is None
    assert call.add_generation_prompt
    assert not call.stream


def refusal(parsed_sampling) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        parsed_sampling()
    return caught.value.field, str(caught.value).partition(" must")[0]


@pytest.mark.parametrize(
    "body, field, shown",
    [
        ({"max_tokens": -1}, "max_tokens", "max_tokens=-1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens=-1"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens=-1"),
        ({"seed": 2**63}, "seed", f"seed={2**63}"),
        ({"sampling_seed": 2**63}, "sampling_seed", f"sampling_seed={2**63}"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs=-1"),
        ({"top_k": -2}, "top_k", "top_k=-2"),
    ],
)
def test_refusals_name_the_fields_of_the_client(body, field, shown):
    assert refusal(lambda: chat(**body).sampling(10)) == (field, shown)


@pytest.mark.parametrize(
    "body, field, shown",
    [
        ({"max_tokens": -1}, "max_tokens", "max_tokens=-1"),
        ({"logprobs": -1}, "logprobs", "logprobs=-1"),
    ],
)
def test_refused_completions_name_the_fields_of_the_client(body, field, shown):
    encoded = msgspec.json.encode({"prompt": "a", **body})
    assert refusal(lambda: parse_completion(encoded).sampling()) == (field, shown)


def test_every_value_of_a_refusal_has_the_clients_name():
    with pytest.raises(InvalidRequestError, match="min_tokens=5 must not exceed max_tokens=4"):
        chat(max_tokens=4, min_tokens=5).sampling(10)


def test_max_completion_tokens_wins():
    assert chat(max_tokens=5).sampling(100).max_new_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).sampling(100).max_new_tokens == 6


def test_sampling_extras():
    call = chat(seed=3, stop="x", top_k=4, min_tokens=2, stop_token_ids=[9], logit_bias={"1": 2})
    sampling = call.sampling(10)
    assert sampling.sampling_seed == 3
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (9,))
    assert (sampling.top_k, sampling.min_new_tokens) == (4, 2)
    assert sampling.logit_bias == ((1, 2.0),)


@pytest.mark.parametrize(
    "wanted, schema",
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}},
            '{"type":"string"}',
        ),
    ],
)
def test_response_format(wanted, schema):
    assert chat(response_format=wanted).sampling(10).json_schema == schema


def test_router_defaults_are_accepted():
    call = chat(
        logprobs=False,
        max_completion_tokens=4,
        stream=False,
        no_stop_trim=False,
        ignore_eos=False,
        continue_final_message=False,
        skip_special_tokens=True,
        separate_reasoning=True,
        stream_reasoning=True,
        chat_template_kwargs={"enable_thinking": False},
        return_hidden_states=False,
        reasoning_effort="low",
    )
    assert call.variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_tools_and_further_message_fields_reach_the_template():
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    call = chat(messages=messages, tools=[tool], tool_choice="auto")
    assert call.body.tools == [tool]
    assert call.messages[1]["tool_calls"] == [{"id": "1"}]
    assert call.messages[1]["content"] == ""
    assert call.messages[2]["content"] == "ab"


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_completion_prompts(prompt, prompts):
    assert parse_completion(msgspec.json.encode({"prompt": prompt})).prompts == prompts


@pytest.mark.parametrize("prompt", [[1, "a"], [1, [2]], 5, [True], [[1.5]]])
def test_mixed_prompts_are_refused(prompt):
    with pytest.raises(MalformedRequestError):
        parse_completion(msgspec.json.encode({"prompt": prompt}))


def test_completion_options():
    body = {"prompt": "a", "echo": True, "logprobs": 3, "max_tokens": 0}
    call = parse_completion(msgspec.json.encode(body))
    assert call.logprobs == LogprobOptions(prompt_start=0, top_k=3)
    assert call.sampling().max_new_tokens == 0
    assert parse_completion(b'{"prompt": "a"}').sampling().max_new_tokens == 16


NAMES = st.sampled_from([field.name for field in msgspec.structs.fields(ChatBody)])
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just(ASK)


@given(st.dictionaries(NAMES, VALUES, max_size=6).map(msgspec.json.encode))
def test_any_chat_body_is_parsed_or_refused(body):
    try:
        call = parse_chat(body)
        call.sampling(10)
    except InvalidRequestError as error:
        assert str(error)


def test_chunks_begin_with_the_role_and_end_with_usage():
    header = Header(id="c", model="m", created=1, texts=Texts(), include_usage=True)
    renderer = ChatRenderer(header)
    events = renderer.chunk(GenerateDelta(token_ids=(1,), text="a"))
    events += renderer.chunk(GenerateDelta(token_ids=(2,), text=""))
    events += renderer.chunk(GenerateDelta(token_ids=(3,), text="b", finish_reason=Length(3)))
    output = GenerateOutput(
        completions=(Completion(token_ids=(1, 2, 3), text="ab", finish_reason=Length(3)),),
        prompt_tokens=5,
    )
    events += renderer.closing([output])
    chunks = [msgspec.json.decode(line[6:]) for line in events.split(b"\n\n") if line]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
    ]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8


def test_aborted_answer_keeps_its_text():
    header = Header(id="c", model="m", created=1, texts=Texts())
    output = GenerateOutput(
        completions=(Completion(token_ids=(1,), text="a", finish_reason=Abort()),),
        prompt_tokens=5,
    )
    body = ChatRenderer(header).whole(PromptAnswer(prompt_ids=(9,), output=output))
    choice = msgspec.json.decode(body)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "a")


def test_error_shape():
    assert msgspec.json.decode(error_body("m", 404, param="model", code="model_not_found")) == {
        "error": {
            "message": "m",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_wire_loads_without_torch_and_tokenizers():
    import subprocess
    import sys

    code = (
        "import sys, phalanx.wire.openai, phalanx.wire.sglang; "
        "sys.exit(bool({'torch', 'tokenizers', 'starlette'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
