"""A model whose next step is prepared while one is computed gives what it gives step by step."""

from __future__ import annotations

import threading

import pytest

from phalanx import DeviceConfig, Engine, EngineArgs, EngineConfig
from phalanx.errors import ConfigurationError
from phalanx.loop.driving.threads import StepThreads
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.schema.control import Flush, Pause, PauseMode
from phalanx.schema.generate import GenerateRequest, LogprobOptions, Stop
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive


def request(length: int, first: int = 0, logprobs=None, **sampling) -> GenerateRequest:
    params = {"max_new_tokens": 16, "temperature": 0.0, **sampling}
    prompt = tuple(3 + (7 * index + 13 * first) % 390 for index in range(length))
    return GenerateRequest(input_ids=prompt, sampling=SamplingParams(**params), logprobs=logprobs)


GREEDY = [request(3 + 5 * index, index, max_new_tokens=6 + 3 * index) for index in range(6)]
MIXED = [
    request(4, 1),
    request(30, 2, temperature=1.0, sampling_seed=1),
    request(9, 3, temperature=0.8, top_p=0.9, sampling_seed=2, n=2),
    request(5, 4, repetition_penalty=1.3, presence_penalty=0.5),
    request(6, 5, min_new_tokens=9),
    request(7, 6, stop=("e",), temperature=1.0, sampling_seed=3, max_new_tokens=40),
    request(8, 7, logprobs=LogprobOptions(top_k=2)),
    request(20, 8, logprobs=LogprobOptions(top_k=1, prompt_start=3)),
    request(5, 9, max_new_tokens=0),
    request(4, 10, regex="[ab]{3,9}"),
]


def both(model, requests, *, threads=False, **options):
    """Outputs step by step and looking ahead, and the service that looked ahead, on the loop's own
    thread or on `threads`, as on a device that computes beside the host.
    """
    plain = Drive(model, **options)
    expected = plain.run(*requests)
    plain.service.close()
    ahead = Drive(model, speculate=True, **options)
    if threads:
        ahead.service._loop._driver = StepThreads(ahead.service._engine)
    got = ahead.run(*requests)
    ahead.service.close()
    return expected, got, ahead.service


@pytest.mark.parametrize(
    "options", [{}, {"max_step_tokens": 8}, {"max_batch_size": 2}, {"threads": True}]
)
def test_greedy_outputs_are_the_same(tiny, options):
    expected, got, service = both(tiny, GREEDY, **options)
    assert got == expected
    assert service._loop.num_ahead > 0


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("pool_tokens", [1024, 96])
def test_whatever_a_request_asks_for_is_the_same(tiny, pool_tokens, threads):
    expected, got, service = both(
        tiny, MIXED, pool_tokens=pool_tokens, max_step_tokens=24, threads=threads
    )
    for one, other in zip(expected, got, strict=True):
        assert [part.token_ids for part in one.completions] == [
            part.token_ids for part in other.completions
        ]
        assert [part.text for part in one.completions] == [part.text for part in other.completions]
        assert [part.finish_reason for part in one.completions] == [
            part.finish_reason for part in other.completions
        ]
        for scores, others in [
            (one.prompt_logprobs, other.prompt_logprobs),
            (one.completions[0].logprobs, other.completions[0].logprobs),
        ]:
            assert (scores is None) == (others is None)
            if scores is not None:
                assert scores.token_ids == others.token_ids
                assert scores.values == pytest.approx(others.values, abs=1e-4)
    assert service._loop.num_ahead > 0


def test_an_early_end_costs_one_row_and_leaves_nothing(tiny):
    wanted = [
        request(4, index, max_new_tokens=40, temperature=1.0, sampling_seed=index, stop=("e", "a"))
        for index in range(4)
    ]
    expected, got, service = both(tiny, wanted, threads=True)
    assert [one.completions[0].text for one in got] == [one.completions[0].text for one in expected]
    parts = [one.completions[0] for one in got]
    early = sum(isinstance(part.finish_reason, Stop) and len(part.token_ids) < 40 for part in parts)
    statistics = service.statistics()
    assert statistics.num_discarded == early > 0
    assert statistics.num_ahead > 0


def test_a_flush_and_a_pause_find_nothing_in_flight(tiny):
    drive = Drive(tiny, speculate=True)
    for index in range(3):
        drive.start(f"r{index}", request(4, index))
    drive.tick()
    assert drive.service.control(Flush()) is False
    assert drive.service.control(Pause(PauseMode.ABORT))
    assert drive.service.control(Flush()) is True
    assert drive.service._engine.at_rest()
    drive.service.close()


def test_speculate_is_true_or_false():
    with pytest.raises(ConfigurationError, match="speculate='yes' must be true or false"):
        CausalLMArgs("somewhere", speculate="yes")


def test_an_engine_serves_a_model_that_looks_ahead(tiny_dir):
    """Requests of several threads, a cancellation among them; no thread is left behind."""
    before = set(threading.enumerate())
    config = EngineConfig(DeviceConfig("cpu", "float32"))
    outputs = []
    for speculate in (False, True):
        args = CausalLMArgs(tiny_dir, pool_tokens=512, native_operators="off", speculate=speculate)
        with Engine(EngineArgs("causal_lm", args, config)) as engine:
            futures = [engine.submit(one) for one in GREEDY]
            outputs.append([future.result() for future in futures])
    assert outputs[0] == outputs[1]
    assert not any(
        thread.name.startswith("phalanx-step") for thread in set(threading.enumerate()) - before
    )
