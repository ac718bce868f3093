"""Log-probabilities against a plain forward of transformers on the same weights.

Of the first layers of SmolLM2 where the depth proves nothing.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from phalanx.schema.control import Continue, Pause, PauseMode, Sleep, Wake
from phalanx.schema.generate import GenerateRequest, Length, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive
from tests.models.references import log_probabilities

TOLERANCE = 1e-4
SELECTED = (2, 0, 49151, 504)


@pytest.fixture(scope="module")
def text(shallow) -> tuple[int, ...]:
    sentence = "The keeper of the lighthouse counted 12 ships before the fog came in from the sea. "
    return tuple(shallow.tokenizer.encode(sentence * 4)[:75])


def scored_by(reference):
    """The reference distribution over a sequence of ids, computed once for each."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def of(ids):
        if ids not in known:
            known[ids] = log_probabilities(reference, ids)
        return known[ids]

    return of


@pytest.fixture(scope="module")
def expected(shallow_reference_model):
    return scored_by(shallow_reference_model)


@pytest.fixture(scope="module")
def expected_of_smollm2(smollm2_reference_model):
    return scored_by(smollm2_reference_model)


def request(ids, *, start, top_k=3, selected=SELECTED, **sampling) -> GenerateRequest:
    params = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, **sampling}
    return GenerateRequest(
        input_ids=ids,
        sampling=SamplingParams(**params),
        logprobs=LogprobOptions(prompt_start=start, top_k=top_k, token_ids=selected),
        detokenize=False,
    )


def check(request: GenerateRequest, output, expected) -> None:
    ids = request.input_ids
    completion = output.completions[0]
    scores = expected((*ids, *completion.token_ids))
    start = request.logprobs.prompt_start
    if start is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs.token_ids == ids[start:]
        check_entries(output.prompt_logprobs, scores[start : len(ids)], request.logprobs)
    assert completion.logprobs.token_ids == completion.token_ids
    check_entries(completion.logprobs, scores[len(ids) :], request.logprobs)


def check_entries(found, scores, options) -> None:
    assert len(found.values) == len(scores)
    assert (found.top is None) == (options.top_k == 0)
    assert (found.selected is None) == (not options.token_ids)
    for at, token in enumerate(found.token_ids):
        row = scores[at]
        if row.isnan().all():
            assert at == 0
            assert found.values[0] is None
            assert found.top is None or found.top[0] is None
            assert found.selected is None or found.selected[0] is None
            continue
        assert found.values[at] == pytest.approx(row[token].item(), abs=TOLERANCE)
        if found.top is not None:
            best = row.topk(options.top_k).values.tolist()
            assert [value for value, _ in found.top[at]] == pytest.approx(best, abs=TOLERANCE)
            own = [row[top_id].item() for _, top_id in found.top[at]]
            assert own == pytest.approx(best, abs=TOLERANCE)
        if found.selected is not None:
            assert [selected_id for _, selected_id in found.selected[at]] == list(options.token_ids)
            values = [value for value, _ in found.selected[at]]
            assert values == pytest.approx(row[list(options.token_ids)].tolist(), abs=TOLERANCE)


def requests_of(text):
    starts = [0, 1, 15, 16, 17, 40, len(text) - 1, len(text), None]
    requests = [request(text, start=start) for start in starts]
    requests.append(request(text[:1], start=0, top_k=0))
    requests.append(request(text[:33], start=0, selected=()))
    requests.append(request(text[:20], start=1, temperature=1.0, sampling_seed=7))
    return requests


def by_position(text, start, width=3) -> GenerateRequest:
    """Other tokens at each position; some rows hold the same ids as others."""
    rows = tuple(
        tuple((7 * position + 11 * column) % 49152 for column in range(width))
        for position in range(start, len(text))
    )
    options = LogprobOptions(prompt_start=start, top_k=1, token_ids_by_position=rows)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    return GenerateRequest(input_ids=text, sampling=sampling, logprobs=options, detokenize=False)


@pytest.mark.parametrize("max_step_tokens", [16, 512])
@pytest.mark.parametrize("start", [0, 1, 40, 74])
def test_tokens_chosen_position_by_position(shallow, text, expected, max_step_tokens, start):
    """Also where a prompt is computed in parts, and where none of it is new to the cache."""
    asked = by_position(text, start)
    outputs = Drive(shallow, max_step_tokens=max_step_tokens).run(asked, asked)
    scores = expected(text)
    for output in outputs:
        selected = output.prompt_logprobs.selected
        assert len(selected) == len(text) - start
        for position, row in enumerate(selected, start):
            if position == 0:
                assert row is None
                continue
            ids = asked.logprobs.selected_at(position)
            assert tuple(token for _, token in row) == ids
            values = [value for value, _ in row]
            assert values == pytest.approx(scores[position, list(ids)].tolist(), abs=TOLERANCE)
        assert output.completions[0].logprobs.selected == ((),)


def check_prompt_and_output(model, text, expected, max_step_tokens):
    requests = requests_of(text)
    outputs = Drive(model, max_step_tokens=max_step_tokens).run(*requests)
    for asked, output in zip(requests, outputs, strict=True):
        check(asked, output, expected)


@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_prompt_and_output(shallow, text, expected, max_step_tokens):
    check_prompt_and_output(shallow, text, expected, max_step_tokens)


@pytest.mark.long
@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_prompt_and_output_of_all_layers(smollm2, text, expected_of_smollm2, max_step_tokens):
    check_prompt_and_output(smollm2, text, expected_of_smollm2, max_step_tokens)


def test_pushed_back_while_scoring_a_prompt(shallow, text, expected):
    """Two prompts fill the pool; the first one's output takes the room of the second, which has
    scored some chunks of its prompt by then."""
    first = msgspec.structs.replace(request(text, start=0, max_new_tokens=12), priority=1)
    requests = [first, request(text, start=3)]
    drive = Drive(shallow, max_step_tokens=12, pool_tokens=160)
    outputs = drive.run(*requests)
    assert [output.num_retractions for output in outputs] == [0, 1]
    for asked, output in zip(requests, outputs, strict=True):
        check(asked, output, expected)


@pytest.mark.parametrize("num_ticks", [2, 8])
def test_retracted_by_a_pause(shallow, text, expected, num_ticks):
    """While the prompt is being scored, and while tokens are being generated."""
    asked = request(text, start=1)
    drive = Drive(shallow, max_step_tokens=16)
    drive.start("a", asked)
    for _ in range(num_ticks):
        drive.tick()
    assert bool(drive.deltas["a"]) == (num_ticks > 5)
    drive.service.control(Pause(PauseMode.RETRACT))
    assert drive.service.statistics().pool_used_tokens == 0
    drive.service.control(Continue())
    drive.finish()
    assert drive.output("a").num_retractions == 1
    check(asked, drive.output("a"), expected)


@pytest.mark.parametrize("max_step_tokens", [pytest.param(16, marks=pytest.mark.long), 512])
def test_scoring_a_prompt(shallow, text, expected, max_step_tokens):
    """`max_new_tokens=0` computes the prompt and samples nothing."""
    requests = [request(text, start=start, max_new_tokens=0) for start in (0, 16, len(text))]
    requests.append(request(text[:1], start=0, max_new_tokens=0))
    drive = Drive(shallow, max_step_tokens=max_step_tokens)
    for asked, output in zip(requests, drive.run(*requests), strict=True):
        check(asked, output, expected)
        assert output.completions[0].token_ids == ()
        assert output.completions[0].finish_reason == Length(0)
        assert output.prompt_tokens == len(asked.input_ids)


def test_logprobs_are_of_the_model_and_not_of_the_sampler(shallow, text, expected):
    """Temperature, bias, penalties and filters do not show in them."""
    asked = request(
        text[:12],
        start=None,
        temperature=1.7,
        sampling_seed=3,
        top_p=0.9,
        min_p=0.01,
        logit_bias=((504, 5.0),),
        repetition_penalty=1.3,
        presence_penalty=0.7,
    )
    [output] = Drive(shallow).run(asked)
    check(asked, output, expected)


def test_several_completions_report_the_prompt_once(shallow, text, expected):
    asked = request(text[:20], start=2, temperature=1.0, sampling_seed=11, n=2)
    drive = Drive(shallow)
    [output] = drive.run(asked)
    first, second = output.completions
    assert first.token_ids != second.token_ids
    check(asked, output, expected)
    scores = expected((*asked.input_ids, *second.token_ids))
    check_entries(second.logprobs, scores[20:], asked.logprobs)


def check_against_a_trainer(model, text, expected):
    sampled = [
        request(text[:length], start=0, temperature=1.0, sampling_seed=length, max_new_tokens=12)
        for length in (11, 60)
    ]
    drive = Drive(model, max_step_tokens=32)
    first = drive.run(*sampled)
    assert drive.service.control(Sleep())
    assert drive.service.control(Wake())
    for output, wanted in zip([*first, *drive.run(*sampled)], sampled * 2, strict=True):
        ids = (*wanted.input_ids, *output.completions[0].token_ids)
        scores = expected(ids)
        found = (*output.prompt_logprobs.values, *output.completions[0].logprobs.values)
        plain = [scores[at][token].item() for at, token in enumerate(ids)]
        assert max(abs(a - b) for a, b in zip(found[1:], plain[1:], strict=True)) < TOLERANCE
        # A teacher is given the whole, and scores it.
        [scored] = drive.run(request(ids, start=0, max_new_tokens=0))
        values = scored.prompt_logprobs.values
        assert max(abs(a - b) for a, b in zip(values[1:], plain[1:], strict=True)) < TOLERANCE


def test_complaint_slime_714_log_probabilities_are_those_of_a_plain_forward(
    shallow, text, expected
):
    """What a trainer computes of the same tokens, sampled and given, whatever computed beside it.

    Also after the weights were given back, and taken again.
    """
    check_against_a_trainer(shallow, text, expected)


@pytest.mark.long
def test_log_probabilities_of_all_layers_are_those_of_a_plain_forward(
    smollm2, text, expected_of_smollm2
):
    check_against_a_trainer(smollm2, text, expected_of_smollm2)
