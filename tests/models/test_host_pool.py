"""A language model whose requests are moved to host memory and back gives what it gives with room."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.schema.control import Continue, Pause, PauseMode
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            input_ids=tuple(range(3 + index, 12 + index)),
            detokenize=False,
            sampling=SamplingParams(
                max_new_tokens=10 + index,
                sampling_seed=index,
                temperature=index % 3 / 2,
                frequency_penalty=0.3 * (index % 2),
                ignore_eos=True,
            ),
        )
        for index in range(6)
    ]


def ids(output) -> tuple[int, ...]:
    return output.completions[0].token_ids


@pytest.fixture(scope="module")
def roomy(tiny):
    return [ids(output) for output in Drive(tiny).run(*requests())]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_nothing_of_a_move_to_the_host_shows(tiny, roomy, eviction, prefix_cache):
    drive = Drive(
        tiny,
        pool_tokens=60,
        page_size=4,
        host_pool_tokens=400,
        eviction=eviction,
        prefix_cache=prefix_cache,
    )
    outputs = drive.run(*requests())
    assert [ids(output) for output in outputs] == roomy
    statistics = drive.service.statistics()
    assert statistics.num_offloads == statistics.num_reloads > 0
    assert statistics.num_offloaded == 0
    assert {output.num_retractions for output in outputs} == {0}


def test_what_the_host_has_no_room_for_is_computed_again(tiny, roomy):
    drive = Drive(tiny, pool_tokens=60, page_size=4, host_pool_tokens=20)
    outputs = drive.run(*requests())
    assert [ids(output) for output in outputs] == roomy
    statistics = drive.service.statistics()
    assert statistics.num_offloads > 0
    assert statistics.num_retractions > 0


def test_a_pause_that_retracts_leaves_nothing_on_the_host(tiny, roomy):
    drive = Drive(tiny, pool_tokens=60, page_size=4, host_pool_tokens=400)
    for index, one in enumerate(requests()):
        drive.start(str(index), one)
    while not drive.service.statistics().num_offloaded:
        drive.tick()
    drive.service.control(Pause(PauseMode.RETRACT))
    statistics = drive.service.statistics()
    assert (statistics.num_offloaded, statistics.pool_used_tokens) == (0, 0)
    drive.service.control(Continue())
    drive.finish()
    assert [ids(drive.output(str(index))) for index in range(6)] == roomy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_pool_tokens": -1}, "host_pool_tokens=-1 must be a number of tokens"),
        ({"host_pool_tokens": True}, "host_pool_tokens=True"),
        ({"host_pool_tokens": 1.5}, "host_pool_tokens=1.5"),
        ({"eviction": "mru"}, "eviction='mru'; allowed: \\('lru', 'priority'\\)"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        CausalLMArgs("somewhere", **options)
