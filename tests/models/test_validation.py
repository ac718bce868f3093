"""Requests that are refused: before they are queued, or when their text is known."""

from __future__ import annotations

import math

import msgspec
import pytest

from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.schema.generate import GenerateRequest, Handoff, LogprobOptions, SequenceHandoff
from phalanx.schema.limits import Limits
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive, load

LIMITS = Limits(context_length=32, pool_tokens=64, vocab_size=400, max_batch_size=8)
IDS = (5, 6, 7)


def refusal(ids=IDS, logprobs=None, **sampling) -> InvalidRequestError:
    params = {"max_new_tokens": 4, **sampling}
    with pytest.raises(InvalidRequestError) as caught:
        request = GenerateRequest(
            input_ids=ids, sampling=SamplingParams(**params), logprobs=logprobs
        )
        CausalLM.validate(request, LIMITS)
    return caught.value


@pytest.mark.parametrize("bad", [(400,), (3, -1, 4), (3, 2.0, 4), ("3",), (3, True), (3, None)])
def test_ids_outside_the_vocabulary(bad):
    error = refusal(bad)
    assert error.field == "input_ids"
    assert "0 to 399" in str(error)


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("stop_token_ids", {"stop_token_ids": (400,)}),
        ("logit_bias", {"logit_bias": ((400, 1.0),)}),
    ],
)
def test_ids_of_the_sampler(field, sampling):
    assert refusal(**sampling).field == field


@pytest.mark.parametrize("token", [400, -5])
def test_ids_that_another_engine_has_drawn(token):
    drawn = SequenceHandoff(seed=1, output_ids=(7, token))
    handoff = Handoff(num_prompt_tokens=len(IDS), sequences=(drawn,))
    with pytest.raises(InvalidRequestError, match=f"handoff holds {token}; token ids are"):
        CausalLM.validate(
            GenerateRequest(
                input_ids=IDS, sampling=SamplingParams(max_new_tokens=4), handoff=handoff
            ),
            LIMITS,
        )


def test_ids_to_score():
    error = refusal(logprobs=LogprobOptions(token_ids=(1, 400)))
    assert error.field == "token_ids_logprob"


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("prompt", {"prompt": 123}),
        ("prompt", {"prompt": "a\ud800b"}),
        ("priority", {"prompt": "a", "priority": "high"}),
        ("priority", {"prompt": "a", "priority": True}),
    ],
)
def test_values_of_another_type(field, given):
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest(**given)
    assert caught.value.field == field


def test_one_stop_string_is_not_a_sequence_of_characters():
    for field in ("stop", "stop_regex"):
        with pytest.raises(InvalidRequestError, match="must be a sequence of strings") as caught:
            SamplingParams(**{field: "END"})
        assert caught.value.field == field


def test_stop_strings_are_bounded_in_all():
    SamplingParams(stop=("x" * 1024,) * 16)
    with pytest.raises(InvalidRequestError, match="16385 characters in all; at most 16384"):
        SamplingParams(stop=("x" * 1024,) * 16 + ("y",))


def test_what_start_cannot_handle_fails_its_own_request(tiny):
    odd = GenerateRequest(input_ids=IDS, sampling=SamplingParams(max_new_tokens=2))
    msgspec.structs.force_setattr(odd, "input_ids", 7)
    drive = Drive(tiny)
    drive.start("odd", odd)
    drive.start("good", GenerateRequest(input_ids=IDS, sampling=SamplingParams(max_new_tokens=2)))
    drive.finish()
    assert isinstance(drive.error("odd"), TypeError)
    assert len(drive.output("good").completions[0].token_ids) == 2


def test_ids_to_score_are_bounded():
    LogprobOptions(token_ids=(1,) * 1024)
    with pytest.raises(InvalidRequestError, match="1025 entries; at most 1024"):
        LogprobOptions(token_ids=(1,) * 1025)


def test_ids_by_position_are_a_row_for_each_position():
    field = "token_ids_logprob_by_position"
    good = LogprobOptions(prompt_start=1, token_ids_by_position=((1, 2), (3, 4)))
    few = SamplingParams(max_new_tokens=2)
    CausalLM.validate(GenerateRequest(input_ids=IDS, sampling=few, logprobs=good), LIMITS)
    for start, rows in ((0, ((1,), (2,))), (2, ((1,), (2,))), (1, ((1,), (400,)))):
        options = LogprobOptions(prompt_start=start, token_ids_by_position=rows)
        assert refusal(logprobs=options).field == field
    for bad in (
        {"token_ids_by_position": ((1,),)},
        {"token_ids_by_position": ((1,),), "prompt_start": 0, "token_ids": (1,)},
        {"token_ids_by_position": ((1,), (1, 2)), "prompt_start": 0},
        {"token_ids_by_position": ((),), "prompt_start": 0},
        {"token_ids_by_position": ((1,) * 257,), "prompt_start": 0},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            LogprobOptions(**bad)
        assert caught.value.field == field


def test_lengths():
    assert refusal((5,) * 32).field == "prompt"
    assert refusal((5,) * 29).field == "max_new_tokens"
    assert refusal((), max_new_tokens=1).field == "input_ids"
    for ids, count in (((5,) * 28, 4), ((5,) * 32, 0)):
        request = GenerateRequest(input_ids=ids, sampling=SamplingParams(max_new_tokens=count))
        CausalLM.validate(request, LIMITS)


def test_what_can_never_fit_the_pool(tiny):
    """A request may have as many tokens as the cache holds, where that is less than the context."""
    limits = Drive(tiny, pool_tokens=48).service.limits
    assert (limits.context_length, limits.pool_tokens) == (48, 48)
    longest = GenerateRequest(input_ids=(5,) * 40, sampling=SamplingParams(max_new_tokens=8))
    CausalLM.validate(longest, limits)
    [output] = Drive(tiny, pool_tokens=48).run(longest)
    assert output.prompt_tokens == 40
    longer = GenerateRequest(input_ids=(5,) * 40, sampling=SamplingParams(max_new_tokens=9))
    with pytest.raises(InvalidRequestError, match="exceed the 48 tokens"):
        CausalLM.validate(longer, limits)


def test_scores_beyond_the_prompt():
    error = refusal(logprobs=LogprobOptions(prompt_start=4))
    assert error.field == "logprob_start_len"
    assert "0 to 3" in str(error)


@pytest.mark.parametrize("expression", ["(", "a*", "(?=a)", r"(a)\1", "(a{1000}){1000}"])
def test_stop_expressions(expression):
    assert refusal(stop_regex=(expression,)).field == "stop_regex"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_k", 0),
        ("min_p", 1.5),
        ("repetition_penalty", math.inf),
        ("n", 0),
        ("min_new_tokens", 5),
        ("max_new_tokens", -1),
        ("stop", ("x",) * 1000),
        ("stop", ("",)),
    ],
)
def test_sampling_values(field, value):
    assert refusal(**{field: value}).field == field


@pytest.mark.parametrize(
    ("prompt", "logprobs", "field"),
    [
        ("a" * 400, None, "prompt"),
        ("abc", LogprobOptions(prompt_start=200), "logprob_start_len"),
    ],
)
def test_a_text_is_measured_in_tokens(tiny, prompt, logprobs, field):
    """Only the loaded model can; the request ends in a failure of its own."""
    request = GenerateRequest(
        prompt=prompt, sampling=SamplingParams(max_new_tokens=2), logprobs=logprobs
    )
    drive = Drive(tiny)
    CausalLM.validate(request, drive.service.limits)
    drive.start("bad", request)
    drive.start("good", GenerateRequest(prompt="abc", sampling=SamplingParams(max_new_tokens=2)))
    drive.finish()
    error = drive.error("bad")
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
    assert len(drive.output("good").completions[0].token_ids) == 2


def test_text_without_a_tokenizer(tiny_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_dir / name)
    drive = Drive(load(tmp_path))
    drive.start("text", GenerateRequest(prompt="abc"))
    drive.start("ids to text", GenerateRequest(input_ids=IDS))
    ids = GenerateRequest(
        input_ids=IDS, detokenize=False, sampling=SamplingParams(max_new_tokens=2)
    )
    drive.start("ids", ids)
    drive.finish()
    assert "no tokenizer" in str(drive.error("text"))
    assert "no tokenizer" in str(drive.error("ids to text"))
    assert drive.output("ids").completions[0].text is None
