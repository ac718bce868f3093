"""A real model answers alike whether it computes a prompt or finds its beginning in the cache."""

from __future__ import annotations

import pytest

from phalanx.schema.control import Flush, Pause, PauseMode
from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import BFLOAT16, Drive, load
from tests.models.test_greedy import CAPITAL, FRUITS, KNOWN, chat_ids, greedy, ids_of

PAGE = 16


@pytest.fixture(scope="module")
def tale(shallow) -> tuple[int, ...]:
    text = "Once upon a time there was a lighthouse. " * 14
    return tuple(shallow.tokenizer.encode(text)[:100])


def request_of(ids, logprobs=None, **sampling) -> GenerateRequest:
    params = {"temperature": 0.0, "max_new_tokens": 8, **sampling}
    return GenerateRequest(input_ids=ids, sampling=SamplingParams(**params), logprobs=logprobs)


def scores(output) -> list[float]:
    return list(output.completions[0].logprobs.values)


def alike(model, values):
    """The same bits, where a row's sums do not depend on how many rows there are."""
    if model.operators.name == "native":
        return list(values)
    return [None if value is None else pytest.approx(value, abs=2e-5) for value in values]


def test_known_ids_the_first_and_the_second_time(smollm2):
    """The last page of a prompt is never whole, or has its last token left out."""
    drive = Drive(smollm2)
    requests = [greedy(chat_ids(smollm2, prompt)) for prompt in (CAPITAL, FRUITS)]
    first = [drive.run(request)[0] for request in requests]
    again = [drive.run(request)[0] for request in requests]
    for outputs in (first, again):
        assert [ids_of(output) for output in outputs] == [KNOWN[CAPITAL], KNOWN[FRUITS]]
    # The two begin alike, with the same system prompt.
    assert [output.cached_tokens for output in first] == [0, PAGE]
    assert [output.cached_tokens for output in again] == [2 * PAGE, 2 * PAGE]
    assert [output.prompt_tokens for output in again] == [37, 34]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 5},
        pytest.param(
            {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
            marks=pytest.mark.long,
        ),
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        pytest.param({"n": 3, "temperature": 1.0, "sampling_seed": 7}, marks=pytest.mark.long),
        pytest.param({"min_new_tokens": 6, "logit_bias": ((260, 4.0),)}, marks=pytest.mark.long),
    ],
    ids=["sampled", "penalties", "structured", "several", "biased"],
)
def test_the_same_answer_with_what_is_known(shallow, tale, sampling):
    cached, plain = Drive(shallow), Drive(shallow, prefix_cache=False)
    request = request_of(tale, LogprobOptions(top_k=2), **sampling)
    [expected] = plain.run(request)
    for known in (False, True):
        [output] = cached.run(request)
        for one, other in zip(output.completions, expected.completions, strict=True):
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
            assert list(one.logprobs.values) == alike(shallow, other.logprobs.values)
        assert output.cached_tokens == (96 if known else 0)
        assert expected.cached_tokens == 0


def test_a_tail_that_is_computed_as_before_gives_the_same_bits(shallow, tale):
    """In chunks that begin where the known part ends, nothing is added up in another order."""
    drive = Drive(shallow, max_step_tokens=48)
    first, again = (drive.run(request_of(tale, LogprobOptions()))[0] for _ in range(2))
    assert again.cached_tokens == 96
    assert scores(again) == scores(first)
    assert ids_of(again) == ids_of(first)


def test_bfloat16(shallow_dir, tale):
    drive = Drive(load(shallow_dir, BFLOAT16), BFLOAT16, max_step_tokens=48)
    first, again = (drive.run(request_of(tale, LogprobOptions()))[0] for _ in range(2))
    assert again.cached_tokens == 96
    assert scores(again) == scores(first)


@pytest.mark.parametrize(
    ("start", "cached"),
    [
        pytest.param(0, 0, marks=pytest.mark.long),
        (1, 0),
        pytest.param(33, 32, marks=pytest.mark.long),
        (64, 48),
        pytest.param(100, 96, marks=pytest.mark.long),
    ],
)
def test_positions_whose_scores_are_wanted_are_computed(shallow, tale, start, cached):
    options = LogprobOptions(prompt_start=start, top_k=1)
    [expected] = Drive(shallow, prefix_cache=False).run(request_of(tale, options))
    drive = Drive(shallow)
    drive.run(request_of(tale))
    [output] = drive.run(request_of(tale, options))
    assert output.cached_tokens == cached
    assert output.prompt_logprobs.token_ids == expected.prompt_logprobs.token_ids == tale[start:]
    values = expected.prompt_logprobs.values
    assert list(output.prompt_logprobs.values) == alike(shallow, values)
    assert ids_of(output) == ids_of(expected)


def test_a_prompt_that_is_only_scored_makes_its_pages_known(tiny):
    drive = Drive(tiny)
    ids = tuple(range(3, 60))
    drive.run(request_of(ids, LogprobOptions(prompt_start=0), max_new_tokens=0))
    [output] = drive.run(request_of(ids))
    assert output.cached_tokens == 48


def test_completions_of_one_prompt_compute_it_once(tiny):
    drive = Drive(tiny, max_step_tokens=48)
    ids = tuple(range(3, 53))
    [output] = drive.run(request_of(ids, n=4, temperature=1.0, ignore_eos=True))
    assert (output.prompt_tokens, output.cached_tokens) == (50, 0)
    statistics = drive.service.statistics()
    assert (statistics.num_prompt_tokens, statistics.num_cached_tokens) == (50 + 3 * 2, 3 * 48)


def test_an_answer_and_its_prompt_begin_the_next_turn(tiny):
    drive = Drive(tiny)
    ids = tuple(range(3, 23))
    [answer] = drive.run(request_of(ids, max_new_tokens=30, ignore_eos=True))
    talk = (*ids, *ids_of(answer), 5, 6, 7)
    [output] = drive.run(request_of(talk, ignore_eos=True))
    assert output.cached_tokens == 48
    [expected] = Drive(tiny, prefix_cache=False).run(request_of(talk, ignore_eos=True))
    assert ids_of(output) == ids_of(expected)


def test_statistics_tell_what_is_kept_and_what_was_found(tiny):
    drive = Drive(tiny)
    ids = tuple(range(3, 52))
    for _ in range(2):
        drive.run(request_of(ids, max_new_tokens=1))
    statistics = drive.service.statistics()
    assert (statistics.num_prompt_tokens, statistics.num_cached_tokens) == (49 + 1, 48)
    assert (statistics.pool_used_tokens, statistics.pool_cached_tokens) == (0, 48)


def test_a_flush_forgets_and_is_refused_while_somebody_is_there(tiny):
    drive = Drive(tiny)
    ids = tuple(range(3, 52))
    drive.run(request_of(ids))
    drive.start("live", request_of(ids))
    assert drive.service.control(Flush()) is False
    drive.finish()
    assert drive.output("live").cached_tokens == 48
    assert drive.service.control(Flush()) is True
    assert drive.service.statistics().pool_cached_tokens == 0
    [output] = drive.run(request_of(ids))
    assert output.cached_tokens == 0


def test_what_a_retracted_request_finds_of_itself_is_not_told_as_cached(tiny):
    drive = Drive(tiny)
    ids = tuple(range(3, 52))
    drive.start("r", request_of(ids, max_new_tokens=20, ignore_eos=True))
    for _ in range(10):
        drive.tick()
    drive.service.control(Pause(PauseMode.RETRACT))
    assert drive.service.statistics().pool_used_tokens == 0
    drive.service._loop.paused = False
    before = drive.service.statistics().num_steps
    drive.finish()
    output = drive.output("r")
    assert (output.cached_tokens, output.num_retractions) == (0, 1)
    assert drive.service.statistics().num_steps - before <= 20 - 9
    [expected] = Drive(tiny, prefix_cache=False).run(
        request_of(ids, max_new_tokens=20, ignore_eos=True)
    )
    assert ids_of(output) == ids_of(expected)


def test_without_the_cache_nothing_is_kept(tiny):
    drive = Drive(tiny, prefix_cache=False)
    ids = tuple(range(3, 52))
    for _ in range(2):
        [output] = drive.run(request_of(ids))
        assert output.cached_tokens == 0
    assert drive.service.statistics().pool_cached_tokens == 0
