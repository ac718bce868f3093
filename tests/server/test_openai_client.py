"""The unmodified `openai` client against a model server."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.running import RunningServer

MODEL = "tiny-script"
ASK = [{"role": "user", "content": "Hello 北京"}]
PROMPT = "<|im_start|>user\nHello 北京<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


def shown(text: str) -> str:
    return text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_models(openai_client):
    models = openai_client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert openai_client.models.retrieve(MODEL).id == MODEL


def test_chat(openai_client, tokenizer):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, extra_body={"stop_token_ids": [1], "top_k": 1}
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].matched_stop == 1
    prompt_tokens = len(tokenizer.encode(PROMPT))
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.total_tokens == prompt_tokens + answer.usage.completion_tokens


def test_chat_without_limit_goes_on_to_the_end(openai_client):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, extra_body={"ignore_eos": False, "no_stop_trim": True}
    )
    # The scripted model repeats its prompt, whose first <|im_end|> ends the turn.
    assert answer.choices[0].message.content == "user\nHello 北京"
    assert answer.choices[0].finish_reason == "stop"


def test_chat_stream_with_usage(openai_client, tokenizer):
    stream = openai_client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        stream=True,
        max_completion_tokens=6,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == shown(tokenizer.decode(tokenizer.encode(PROMPT)[:6], skip_special_tokens=True))
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6


def test_chat_logprobs(openai_client, tokenizer):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, logprobs=True, top_logprobs=2, max_tokens=4
    )
    content = answer.choices[0].logprobs.content
    ids = tokenizer.encode(PROMPT)[:4]
    assert [entry.logprob for entry in content] == [-0.25 * (one % 4) for one in ids]
    assert [entry.token for entry in content] == [tokenizer.token_text(one) for one in ids]
    assert bytes(content[1].bytes) == tokenizer.token_bytes(ids[1])
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -0.75]


def test_chat_stream_logprobs(openai_client):
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, logprobs=True, max_tokens=4, stream=True
    )
    entries = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert len(entries) == 4


def test_several_choices_and_stop(openai_client):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=ASK, n=2, stop=["北"], seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.content for choice in answer.choices} == {"user\nHello "}
    assert answer.choices[0].finish_reason == "stop"


def test_content_parts(openai_client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello 北京"}]}]
    answer = openai_client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == "user\nHello 北京"


def test_completions(openai_client):
    answer = openai_client.completions.create(model=MODEL, prompt="The sea", max_tokens=50)
    assert answer.choices[0].text == "The sea"
    assert answer.usage.completion_tokens == answer.usage.prompt_tokens + 1


def test_completions_default_length(openai_client, tokenizer):
    answer = openai_client.completions.create(model=MODEL, prompt="a b c d e f g h i j k l m n o")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_completions_of_several_prompts(openai_client):
    answer = openai_client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=9)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_completions_of_ids_with_echo_and_logprobs(openai_client, tokenizer):
    ids = tokenizer.encode("The sea")
    answer = openai_client.completions.create(
        model=MODEL, prompt=ids, max_tokens=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text == "The sea"
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(ids)
    assert choice.logprobs.text_offset[1] == len(tokenizer.token_text(ids[0]))


def test_completions_stream(openai_client):
    stream = openai_client.completions.create(
        model=MODEL, prompt=["ab", "cd"], max_tokens=9, stream=True, echo=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "abab", 1: "cdcd"}


def test_reinforcement_learning_extras(openai_client, tokenizer):
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=2,
        logprobs=True,
        extra_headers={"x-sglext-return-output-ids": "1"},
        extra_body={
            "return_token_ids": True,
            "return_prompt_token_ids": True,
            "return_meta_info": True,
            "return_input_ids_in_sglext": True,
        },
    ).model_dump()
    ids = tokenizer.encode(PROMPT)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["response_token_ids"] == choice["token_ids"] == ids[:2]
    assert choice["meta_info"]["output_token_logprobs"][0][1] == ids[0]
    assert choice["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert answer["sglext"] == {"input_ids": [ids], "output_ids": [ids[:2]]}


def test_extras_are_refused_in_a_stream(openai_client):
    with pytest.raises(openai.BadRequestError, match="stream=false"):
        openai_client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, extra_body={"return_token_ids": True}
        )


def test_final_message_is_continued(openai_client, tokenizer):
    messages = [*ASK, {"role": "assistant", "content": "I am"}]
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=1,
        extra_body={"continue_final_message": True, "return_prompt_token_ids": True},
    ).model_dump()
    prompt = tokenizer.decode(answer["choices"][0]["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nI am")


def test_unknown_model(openai_client):
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model="gpt-x", messages=ASK)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt-x")


@pytest.mark.parametrize(
    "extra, field",
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"tempratur": 1}, "tempratur"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_errors_name_the_field(openai_client, extra, field):
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=MODEL, messages=ASK, extra_body=extra)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"


def test_misspelt_field_is_told_the_nearest(openai_client):
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        openai_client.completions.create(model=MODEL, prompt="a", extra_body={"temperatur": 1})


def test_failure_is_an_internal_error(openai_client):
    with pytest.raises(openai.InternalServerError, match="scripted failure"):
        openai_client.chat.completions.create(model=MODEL, messages=ASK, seed=666)


def test_failure_in_a_stream_raises_in_the_client(openai_client):
    stream = openai_client.chat.completions.create(model=MODEL, messages=ASK, seed=667, stream=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        for _ in stream:
            pass


def test_api_key(serve):
    with serve(server={"api_key": "secret", "served_model_name": "mine"}) as server:
        base = f"{server.url}/v1"
        with openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        with openai.OpenAI(base_url=base, api_key="secret", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["mine", MODEL]
            answer = client.completions.create(model="mine", prompt="a")
            assert answer.model == "mine"
        with server.client() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/ready").status_code == 200
            assert http.get("/metrics").status_code == 401
            assert http.post("/generate", json={"text": "a"}).status_code == 401
