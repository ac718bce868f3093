"""What ends a text, and what of it is kept."""

from __future__ import annotations

import pytest

from phalanx.schema.generate import GenerateRequest, Length, Stop
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive
from tests.models.test_greedy import CAPITAL, chat_ids

SENTENCE = "The capital of France is Paris."
IDS = (504, 3575, 282, 4649, 314, 7042, 30, 2)
PARIS, DOT, EOS = 7042, 30, 2


@pytest.fixture(scope="module")
def answer(smollm2):
    """One drive for all: its answer to a fixed question, by what should end it."""
    prompt, drive = chat_ids(smollm2, CAPITAL), Drive(smollm2)

    def of(detokenize=True, **sampling):
        params = {"temperature": 0.0, "max_new_tokens": 10, **sampling}
        request = GenerateRequest(
            input_ids=prompt, sampling=SamplingParams(**params), detokenize=detokenize
        )
        [output] = drive.run(request)
        return output.completions[0]

    return of


def test_end_of_text(answer):
    completion = answer()
    assert completion.token_ids == IDS
    assert completion.text == SENTENCE
    assert completion.finish_reason == Stop(EOS)


def test_special_tokens_are_kept_when_asked_for(answer):
    completion = answer(skip_special_tokens=False, no_stop_trim=True)
    assert completion.text == SENTENCE + "<|im_end|>"
    assert answer(skip_special_tokens=False).text == SENTENCE


def test_stop_string_over_token_bounds(answer):
    completion = answer(stop=("never", "nce is Par"))
    assert completion.text == "The capital of Fra"
    assert completion.token_ids == IDS[:6]
    assert completion.finish_reason == Stop("nce is Par")
    assert answer(stop=("nce is Par",), no_stop_trim=True).text == "The capital of France is Par"


def test_half_a_stop_string_is_handed_out_at_the_end(answer):
    completion = answer(stop=("Paris.\n",))
    assert completion.text == SENTENCE
    assert completion.finish_reason == Stop(EOS)
    cut = answer(stop=("is Paris",), max_new_tokens=5)
    assert cut.text == "The capital of France is"
    assert cut.finish_reason == Length(5)


def test_stop_expression(answer):
    completion = answer(stop_regex=(r"Fr\w+ce",))
    assert completion.text == "The capital of France"
    assert completion.finish_reason == Stop(r"Fr\w+ce")


def test_stop_token(answer):
    completion = answer(stop_token_ids=(PARIS,))
    assert completion.token_ids == IDS[:6]
    assert completion.text == "The capital of France is"
    assert completion.finish_reason == Stop(PARIS)
    assert answer(stop_token_ids=(PARIS,), no_stop_trim=True).text == SENTENCE[:-1]


def test_end_of_text_is_ignored(answer):
    completion = answer(ignore_eos=True)
    assert completion.token_ids[:8] == IDS
    assert len(completion.token_ids) == 10
    assert completion.finish_reason == Length(10)
    assert answer(ignore_eos=True, stop_token_ids=(EOS,)).finish_reason == Stop(EOS)


def test_no_end_before_the_least_number_of_tokens(answer):
    completion = answer(min_new_tokens=9)
    assert EOS not in completion.token_ids[:8]
    assert completion.token_ids[:7] == IDS[:7]
    forbidden = answer(min_new_tokens=6, stop_token_ids=(PARIS,))
    assert PARIS not in forbidden.token_ids[:6]
    late = answer(min_new_tokens=5, stop=("capital", "Paris"))
    assert late.text == "The capital of France is "
    assert late.finish_reason == Stop("Paris")


def test_ids_alone(answer):
    completion = answer(detokenize=False)
    assert completion.token_ids == IDS
    assert completion.text is None


def test_the_context_ends_a_text(smollm2):
    drive = Drive(smollm2, context_length=12)
    ids = tuple(smollm2.tokenizer.encode("One, two, three"))
    request = GenerateRequest(
        input_ids=ids, sampling=SamplingParams(temperature=0.0, max_new_tokens=12 - len(ids))
    )
    [output] = drive.run(request)
    assert output.completions[0].finish_reason == Length(12 - len(ids))
