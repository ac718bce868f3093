"""Requests that are cancelled or paused, wherever they stand."""

from __future__ import annotations

import pytest

from phalanx.engine_config import use_engine_config
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.schema.events import Final
from phalanx.schema.generate import Abort, GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from phalanx.testing import check_batching_entry
from tests.models.driver import FLOAT32, Drive


def request(length=40, logprobs=None, **sampling) -> GenerateRequest:
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 5, **sampling}
    return GenerateRequest(
        input_ids=tuple(range(3, 3 + length)), sampling=SamplingParams(**params), logprobs=logprobs
    )


def started(tiny, *requests, ticks=0, **options) -> Drive:
    drive = Drive(tiny, **{"max_step_tokens": 16, **options})
    for index, one in enumerate(requests):
        drive.start(str(index), one)
    for _ in range(ticks):
        drive.tick()
    return drive


def cancelled(drive, rid):
    event = drive.ended[rid]
    assert isinstance(event, Final)
    assert event.cancelled
    for completion in event.payload.completions:
        assert completion.finish_reason == Abort()
    return event.payload


def test_cancel_while_waiting(tiny):
    drive = started(tiny, request(), request(), ticks=2, max_batch_size=1)
    drive.service.cancel("1")
    drive.finish()
    output = cancelled(drive, "1")
    assert "1" not in drive.scheduled
    assert output.completions[0].token_ids == ()
    assert output.completions[0].text == ""
    assert output.prompt_tokens == 40
    assert len(drive.output("0").completions[0].token_ids) == 20


def test_cancel_while_prefilling(tiny):
    drive = started(tiny, request(logprobs=LogprobOptions(prompt_start=0)), ticks=2)
    assert drive.service.statistics().pool_used_tokens > 0
    drive.service.cancel("0")
    assert drive.service.statistics().pool_used_tokens == 0
    drive.finish()
    output = cancelled(drive, "0")
    assert output.completions[0].token_ids == ()
    assert 0 < len(output.prompt_logprobs.values) < 40


def test_cancel_while_decoding(tiny):
    whole = started(tiny, request())
    whole.finish()
    drive = started(tiny, request(), request(8), ticks=9)
    drive.service.cancel("0")
    drive.service.cancel("0")
    drive.finish()
    tokens = cancelled(drive, "0").completions[0].token_ids
    assert 0 < len(tokens) < 20
    assert tokens == whole.output("0").completions[0].token_ids[: len(tokens)]
    assert tokens == sum((delta.token_ids for delta in drive.deltas["0"]), ())
    assert len(drive.output("1").completions[0].token_ids) == 20
    drive.service.cancel("0")
    assert not drive.service.busy


def test_cancel_hands_out_what_was_held_back(tiny):
    """A stop string that has begun is text as soon as nothing can complete it."""
    [whole] = Drive(tiny).run(request())
    text = whole.completions[0].text
    held = (text + "never",)
    drive = started(tiny, request(stop=held), ticks=9)
    assert "".join(delta.text for delta in drive.deltas["0"]) == ""
    drive.service.cancel("0")
    drive.finish()
    part = cancelled(drive, "0").completions[0].text
    assert part
    assert text.startswith(part)


def test_cancel_of_several_completions(tiny):
    drive = started(tiny, request(n=3, logit_bias=((9, 100.0),)), ticks=11)
    assert {len(delta.token_ids) for delta in drive.deltas["0"]} == {1}
    drive.service.cancel("0")
    drive.finish()
    output = cancelled(drive, "0")
    assert len(output.completions) == 3


def test_cancel_of_several_completions_keeps_those_that_ended(tiny):
    """With one place in the batch, completions run one after another."""
    drive = started(tiny, request(8, n=3, max_new_tokens=4), ticks=6, max_batch_size=1)
    drive.service.cancel("0")
    drive.finish()
    event = drive.ended["0"]
    assert event.cancelled
    first, second, third = event.payload.completions
    assert len(first.token_ids) == 4
    assert first.finish_reason != Abort()
    assert (0 < len(second.token_ids) < 4, second.finish_reason) == (True, Abort())
    assert (third.token_ids, third.finish_reason) == ((), Abort())


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
@pytest.mark.parametrize("ticks", [0, 2, 9])
def test_a_pause_changes_nothing(tiny, mode, ticks):
    requests = (request(), request(8, n=2))
    whole = started(tiny, *requests)
    whole.finish()
    drive = started(tiny, *requests, ticks=ticks)
    assert drive.service.control(Pause(mode))
    steps = drive.service.statistics().num_steps
    while drive.service.busy:
        drive.tick()
    statistics = drive.service.statistics()
    assert statistics.paused
    assert statistics.num_steps == steps
    holds_cache = mode is PauseMode.IN_PLACE and ticks > 0
    assert (statistics.pool_used_tokens > 0) == holds_cache
    assert drive.service.control(Flush()) != holds_cache
    drive.start("late", request(5))
    drive.tick()
    assert "late" not in drive.scheduled
    assert drive.service.control(Continue())
    drive.finish()
    for rid in ("0", "1"):
        assert drive.output(rid).completions == whole.output(rid).completions
    assert drive.service.control(Flush())


def test_a_pause_that_aborts_ends_all(tiny):
    drive = started(tiny, request(), request(n=2), request(9), ticks=7, max_batch_size=2)
    assert drive.service.control(Pause(PauseMode.ABORT))
    drive.tick()
    for rid in ("0", "1", "2"):
        cancelled(drive, rid)
    assert not drive.service.busy
    assert drive.service.control(Continue())
    drive.finish()


def test_conformance(tiny_dir):
    def loaded() -> CausalLM:
        entry = CausalLM()
        with use_engine_config(FLOAT32):
            entry.setup(CausalLMArgs(tiny_dir, pool_tokens=512, max_step_tokens=16))
        return entry

    check_batching_entry(loaded, [request(), request(8, n=2), request(3)])
