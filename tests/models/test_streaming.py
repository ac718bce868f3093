"""Deltas: whole characters, and all of them together are the final output."""

from __future__ import annotations

import pytest

from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive


def noise(seed, **sampling) -> GenerateRequest:
    """Random bytes, most of which are no UTF-8."""
    params = {"max_new_tokens": 60, "temperature": 2.0, "sampling_seed": seed, **sampling}
    return GenerateRequest(
        prompt="naïve café",
        sampling=SamplingParams(**params),
        logprobs=LogprobOptions(top_k=2, prompt_start=1),
    )


@pytest.mark.parametrize(
    "sampling", [{}, {"n": 3}, {"stop": ("qz", "é")}, {"stop_regex": ("[0-9]",)}]
)
def test_deltas_add_up(tiny, sampling):
    """The driver joins the deltas of each completion and compares them with the final output."""
    drive = Drive(tiny, max_step_tokens=64)
    outputs = drive.run(*(noise(seed, **sampling) for seed in range(6)))
    assert all(len(drive.deltas[rid]) > 1 for rid in drive.deltas)
    if not (sampling.keys() & {"stop", "stop_regex"}):
        for output in outputs:
            for completion in output.completions:
                assert completion.text == tiny.tokenizer.decode(completion.token_ids)
        assert any("\ufffd" in output.completions[0].text for output in outputs)


def test_one_token_a_delta(tiny):
    drive = Drive(tiny)
    drive.run(noise(1, ignore_eos=True))
    [deltas] = drive.deltas.values()
    assert [len(delta.token_ids) for delta in deltas] == [1] * 60
    assert [delta.finish_reason is None for delta in deltas] == [True] * 59 + [False]
    assert [delta.prompt_logprobs is None for delta in deltas] == [False] + [True] * 59


def test_tokens_of_half_characters_give_no_text_yet(tiny):
    """An emoji's four bytes, forced one after the other, come out as one character."""
    tokenizer = tiny.tokenizer
    ids = tokenizer.encode("ab 😀 京")
    request = GenerateRequest(
        input_ids=(5, 6),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=1, logit_bias=((ids[0], 100.0),)),
    )
    [output] = Drive(tiny).run(request)
    assert output.completions[0].token_ids == (ids[0],)
    assert output.completions[0].text == tokenizer.decode(ids[:1])
