"""Random walks against a plain interpreter: many requests at once give what each gives alone, also
after push-backs and beside requests that fail or are cancelled."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.schema.events import Failed, Final
from tests.loop.walks.number_nodes import STAGES, Numbers, Struck
from tests.loop.walks.random_walks import Interpreter, RandomWalk, expected, requests

SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_at_once(data):
    walk = RandomWalk(data.draw)
    run = walk.run()
    given = [data.draw(requests(walk)) for _ in range(data.draw(st.integers(1, 4)))]
    for index, request in enumerate(given):
        run.start(f"r{index}", request)
        if data.draw(st.booleans()):
            run.tick()
    run.finish()
    for index, request in enumerate(given):
        alone = Interpreter(walk, request)
        assert run.output(f"r{index}") == alone.emitted
        assert request.kept[-1] == alone.kept


def check_pushed_back(data):
    walk = RandomWalk(data.draw)
    run = walk.run()
    given = [data.draw(requests(walk)) for _ in range(2)]
    for index, request in enumerate(given):
        run.start(f"r{index}", request)
    budget = 4
    while run.loop.busy:
        run.tick()
        if budget and data.draw(st.booleans()):
            budget -= 1
            run.loop.push_back_all()
    run.finish()
    for index, request in enumerate(given):
        assert run.output(f"r{index}") == expected(walk, request)


def check_disturbed(data):
    walk = RandomWalk(data.draw)
    run = walk.run()
    bad, good = (data.draw(requests(walk)) for _ in range(2))
    stage = data.draw(st.sampled_from([*STAGES, None]))
    if stage is not None:
        node = data.draw(st.sampled_from(walk.nodes)).name
        bad.fault = (stage, node, data.draw(st.integers(0, 3)))
    run.start("bad", bad)
    run.start("good", good)
    for _ in range(data.draw(st.integers(0, 20))):
        run.tick()
    run.loop.cancel("bad")
    run.finish()
    assert run.output("good") == expected(walk, good)
    event = run.ended["bad"]
    if isinstance(event, Failed):
        assert stage is not None
        assert isinstance(event.error, Struck)
    else:
        whole = expected(walk, Numbers(bad.inputs, iterations=bad.iterations))
        assert isinstance(event, Final)
        for name, values in event.payload.items():
            assert values == whole[name][: len(values)]
        assert event.cancelled or event.payload == whole


@SETTINGS
@given(data=st.data())
def test_many_requests_at_once_give_what_the_interpreter_gives(data):
    check_at_once(data)


@SETTINGS
@given(data=st.data())
def test_what_was_pushed_back_is_computed_again_and_goes_on_where_it_was(data):
    check_pushed_back(data)


@SETTINGS
@given(data=st.data())
def test_a_fault_or_a_cancel_ends_one_request_and_leaves_the_others_alone(data):
    check_disturbed(data)


@pytest.mark.long
@pytest.mark.parametrize("check", [check_at_once, check_pushed_back, check_disturbed])
def test_item_8_5_12_many_more_random_walks(check):
    settings(SETTINGS, max_examples=200)(given(data=st.data())(check))()
