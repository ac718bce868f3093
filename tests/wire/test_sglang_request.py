"""SGLang's `/generate` bodies as requests of the schema."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.generate import LogprobOptions
from phalanx.schema.sampling import SamplingParams
from phalanx.wire.sglang import GenerateCall, parse_generate
from phalanx.wire.sglang.body import UNSUPPORTED, GenerateBody


def parse(**body: object) -> GenerateCall:
    return parse_generate(msgspec.json.encode(body))


def test_defaults_are_sglangs():
    call = parse(text="hi")
    (prompt,) = call.prompts
    assert (call.batch, call.stream, call.model) == (False, False, None)
    assert prompt.rid is None
    assert prompt.request.prompt == "hi"
    assert prompt.request.sampling == SamplingParams()
    assert prompt.request.sampling.max_new_tokens == 128
    assert prompt.request.logprobs is None


def test_every_sampling_field_arrives():
    given = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
        "n": 2,
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "sampling_seed": -9,
        "json_schema": "{}",
    }
    call = parse(
        text="hi",
        sampling_params={
            **given,
            "stop": "a",
            "stop_regex": ["b", "c"],
            "stop_token_ids": [3],
            "logit_bias": {"4": -1.5},
        },
    )
    expected = SamplingParams(
        **given,
        stop=("a",),
        stop_regex=("b", "c"),
        stop_token_ids=(3,),
        logit_bias=((4, -1.5),),
    )
    assert call.prompts[0].request.sampling == expected


def test_nulls_mean_defaults():
    fields = {field.name: None for field in msgspec.structs.fields(GenerateBody)}
    call = parse(**{**fields, "text": "hi"})
    assert call.prompts[0].request.sampling == SamplingParams()


def test_batch_spreads_single_values_and_lists():
    call = parse(
        input_ids=[[1, 2], [3]],
        sampling_params=[{"n": 2}, None],
        rid="r",
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=2,
        token_ids_logprob=[[5], None],
        priority=[1, None],
    )
    first, second = call.prompts
    assert call.batch
    assert (first.rid, second.rid) == ("r_0", "r_1")
    assert (first.request.input_ids, second.request.input_ids) == ((1, 2), (3,))
    assert (first.request.sampling.n, second.request.sampling.n) == (2, 1)
    assert first.request.logprobs == LogprobOptions(prompt_start=0, top_k=2, token_ids=(5,))
    assert second.request.logprobs is None
    assert (first.request.priority, second.request.priority) == (1, 0)


def test_single_token_ids_logprob_is_a_list_of_ids():
    call = parse(text="hi", return_logprob=True, token_ids_logprob=[5, 6])
    options = call.prompts[0].request.logprobs
    assert options == LogprobOptions(prompt_start=None, token_ids=(5, 6))


def test_ids_by_position_of_one_prompt_and_of_a_batch():
    asked = {"return_logprob": True, "logprob_start_len": 0}
    call = parse(text="hi", token_ids_logprob_by_position=[[1, 2], [3, 4]], **asked)
    rows = call.prompts[0].request.logprobs.token_ids_by_position
    assert rows == ((1, 2), (3, 4))
    batch = parse(text=["a", "b"], token_ids_logprob_by_position=[[[1], [2]], None], **asked)
    found = [one.request.logprobs.token_ids_by_position for one in batch.prompts]
    assert found == [((1,), (2,)), ()]
    for text, wrong in (("hi", [1, 2]), ("hi", [[[1]]]), (["a"], [[1, 2]]), (["a"], [[[1]], None])):
        with pytest.raises(MalformedRequestError) as caught:
            parse(text=text, token_ids_logprob_by_position=wrong, **asked)
        assert caught.value.field.startswith("token_ids_logprob_by_position")


@pytest.mark.parametrize("start", [None, -1])
def test_no_start_reports_output_only(start):
    call = parse(text="hi", return_logprob=True, logprob_start_len=start)
    assert call.prompts[0].request.logprobs == LogprobOptions()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_refused_only_when_they_ask_for_something(name):
    for nothing in (None, False, [], {}, ""):
        parse(text="hi", **{name: nothing})
    with pytest.raises(MalformedRequestError, match=name) as caught:
        parse(text="hi", **{name: "x"})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "body, field",
    [
        ({"text": "a", "temperature": 1}, "temperature"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"top_k": "x"}}, "sampling_params.top_k"),
        (
            {"text": "a", "sampling_params": {"custom_params": {"a": 1}}},
            "sampling_params.custom_params",
        ),
        ({"text": "a", "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "priority": [1]}, "priority"),
        ({"text": "a", "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
    ],
)
def test_malformed_bodies_name_the_field(body, field):
    with pytest.raises(MalformedRequestError) as caught:
        parse(**body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "sampling, field",
    [({"temperature": -1}, "temperature"), ({"stop": [""]}, "stop"), ({"n": 0}, "n")],
)
def test_values_are_refused_by_the_schema(sampling, field):
    with pytest.raises(InvalidRequestError) as caught:
        parse(text="a", sampling_params=sampling)
    assert not isinstance(caught.value, MalformedRequestError)
    assert caught.value.field == f"sampling_params.{field}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from([field.name for field in msgspec.structs.fields(GenerateBody)])


@given(st.binary(max_size=40) | st.dictionaries(NAMES, JSON, max_size=5).map(msgspec.json.encode))
def test_any_body_is_parsed_or_refused(body):
    try:
        call = parse_generate(body)
    except InvalidRequestError as error:
        assert str(error)
    else:
        assert call.prompts
