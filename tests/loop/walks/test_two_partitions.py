"""A producer of tokens and a consumer of chunks of them, many requests at once on one engine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.loop.walks import Fixed, LeftContext, Sliding, WalkRequest
from phalanx.schema.events import Delta, Failed, Final
from phalanx.testing.two_partitions import (
    Speech,
    SpeechModel,
    SpeechRequest,
    Talker,
    Vocoder,
    expected_speech,
    speech_engine,
)
from tests.loop.threaded import ThreadedLoop

POLICIES = [Fixed(3), Sliding(4, 2), LeftContext(3, 1)]


class Talk:
    """A loop on both nodes; what each request has given, and how it ended."""

    def __init__(
        self, policy, num_pages=64, page_size=4, tokens=32, kind=StepLoop, **nodes
    ) -> None:
        self.engine, self.program = speech_engine(policy, num_pages, page_size, **nodes)
        self.loop = kind(self.engine, Budget(tokens, 8))
        self.given: dict[str, Speech] = {}
        self.ended: dict[str, Final | Failed] = {}
        self.requests: dict[str, SpeechRequest] = {}

    def start(self, rid: str, request: SpeechRequest) -> None:
        self.requests[rid] = request
        self.given[rid] = Speech((), ())
        self.loop.start(rid, WalkRequest(self.program, SpeechModel(), request))

    def tick(self) -> None:
        for event in self.loop.tick():
            assert event.rid not in self.ended, f"{event} after the end"
            if isinstance(event, Delta):
                before, new = self.given[event.rid], event.payload
                self.given[event.rid] = Speech(before.tokens + new.tokens, before.wave + new.wave)
            elif isinstance(event, (Final, Failed)):
                self.ended[event.rid] = event

    def finish(self) -> None:
        while self.loop.busy:
            self.tick()
        if isinstance(self.loop, ThreadedLoop):
            self.loop.close()
        assert self.ended.keys() == self.requests.keys(), "every request ends exactly once"
        assert self.loop.idle
        assert self.engine.at_rest()

    def check(self, *rids: str) -> None:
        for rid in rids or self.requests:
            event = self.ended[rid]
            if isinstance(event, Failed):
                raise event.error
            assert event.payload == self.given[rid] == expected_speech(self.requests[rid])


def speech(index: int) -> SpeechRequest:
    return SpeechRequest(tuple(range(1 + index, 5 + 3 * index)), 9 + 2 * index)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", [StepLoop, ThreadedLoop])
def test_item_8_5_10_each_policy_gives_the_same_wave(policy, kind):
    talk = Talk(policy, kind=kind)
    for index in range(5):
        talk.start(f"r{index}", speech(index))
    talk.finish()
    talk.check()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_tokens_or_none_are_spoken_to_the_end(count):
    talk = Talk(Fixed(2))
    talk.start("r", SpeechRequest((1, 2), count))
    talk.finish()
    talk.check()
    assert len(talk.given["r"].tokens) == count


def test_a_token_ends_the_loop():
    ends = expected_speech(SpeechRequest((1, 2), 12)).tokens[5:7]
    talk = Talk(Fixed(2))
    talk.start("r", SpeechRequest((1, 2), 12, ends))
    talk.start("all at once", SpeechRequest((1, 2), 12, ends=expected_speech(speech(0)).tokens))
    talk.finish()
    talk.check()
    assert len(talk.given["r"].tokens) == 6


def test_item_8_5_10_the_consumer_has_exactly_one_final_chunk():
    chunks: list[tuple[int, bool]] = []

    class Watched(Vocoder):
        def preprocess(self, engine, inputs):
            chunks.extend(
                (len(one.chunks["token"].items), one.chunks["token"].final) for one in inputs
            )
            return super().preprocess(engine, inputs)

    talk = Talk(Fixed(2), vocoder=Watched())
    talk.start("r", SpeechRequest((1, 2, 3), 4))
    talk.finish()
    assert chunks == [(2, False), (2, False), (0, True)]


def test_the_consumer_runs_while_the_producer_goes_on_and_requests_share_steps():
    order: list[tuple[str, int]] = []

    class WatchedTalker(Talker):
        def preprocess(self, engine, inputs):
            order.append(("talk", len(inputs)))
            return super().preprocess(engine, inputs)

    class WatchedVocoder(Vocoder):
        def preprocess(self, engine, inputs):
            order.append(("speak", len(inputs)))
            return super().preprocess(engine, inputs)

    talk = Talk(Fixed(3), talker=WatchedTalker(), vocoder=WatchedVocoder())
    for index in range(3):
        talk.start(f"r{index}", SpeechRequest((1, index), 6))
    talk.finish()
    talk.check()
    assert order == [("talk", 3)] * 3 + [("speak", 3)] + [("talk", 3)] * 3 + [("speak", 3)] * 2


def test_a_long_prompt_is_computed_in_parts_of_which_the_last_counts():
    talk = Talk(Fixed(3), tokens=4)
    talk.start("long", SpeechRequest(tuple(range(30)), 5))
    talk.start("short", SpeechRequest((1, 2), 5))
    talk.finish()
    talk.check()
    assert talk.loop.num_steps > 30 // 4


def test_too_little_memory_pushes_requests_back_and_changes_no_output():
    talk = Talk(Fixed(3), num_pages=9)
    for index in range(4):
        talk.start(f"r{index}", SpeechRequest(tuple(range(index, 4 + index)), 14))
    talk.finish()
    talk.check()
    assert talk.loop.num_push_backs > 0


def test_a_cancel_gives_what_there_is():
    whole = expected_speech(speech(1))
    for num_ticks in range(20):
        talk = Talk(Fixed(2))
        talk.start("r", speech(1))
        talk.start("other", speech(2))
        for _ in range(num_ticks):
            talk.tick()
        ended = "r" in talk.ended
        talk.loop.cancel("r")
        talk.finish()
        talk.check("other")
        event = talk.ended["r"]
        assert isinstance(event, Final)
        assert event.cancelled == (not ended)
        assert event.payload == talk.given["r"]
        assert event.payload.tokens == whole.tokens[: len(event.payload.tokens)]
        assert event.payload.wave == whole.wave[: len(event.payload.wave)]


@pytest.mark.parametrize("node", ["talker", "vocoder"])
def test_a_failure_in_one_node_fails_one_request(node):
    class Breaking:
        def preprocess(self, engine, inputs):
            if any(one.request.prompt == (13,) for one in inputs) and engine.walk != "prefill":
                raise RuntimeError("an unlucky prompt")
            return super().preprocess(engine, inputs)

    kinds = {
        "talker": type("T", (Breaking, Talker), {}),
        "vocoder": type("V", (Breaking, Vocoder), {}),
    }
    talk = Talk(Fixed(2), **{node: kinds[node]()})
    talk.start("unlucky", SpeechRequest((13,), 6))
    for index in range(3):
        talk.start(f"r{index}", speech(index))
    talk.finish()
    talk.check("r0", "r1", "r2")
    event = talk.ended["unlucky"]
    assert isinstance(event, Failed)
    assert str(event.error) == "an unlucky prompt"


def test_only_what_is_looked_at_is_read_on_the_host():
    seen = []

    class Watched(Vocoder):
        def ended_loops(self, inputs, outputs):
            seen.append(outputs)
            return super().ended_loops(inputs, outputs)

    talk = Talk(Fixed(2), vocoder=Watched())
    talk.start("r", speech(0))
    talk.finish()
    assert seen
    assert not any(seen)


class Life:
    """What may happen to a loop of talks, at any time."""

    def __init__(self, draw) -> None:
        self.draw = draw
        policy = draw(
            st.one_of(
                st.integers(1, 4).flatmap(
                    lambda w: st.builds(Sliding, st.just(w), st.integers(1, w))
                ),
                st.builds(LeftContext, st.integers(1, 3), st.integers(0, 4)),
                st.builds(Fixed, st.integers(1, 4)),
            )
        )
        num_pages, tokens = draw(st.sampled_from([7, 9, 60])), draw(st.sampled_from([3, 32]))
        kind = draw(st.sampled_from([StepLoop, ThreadedLoop]))
        self.talk = Talk(policy, num_pages, 3, tokens, kind)
        self.cancelled: set[str] = set()

    def act(self) -> None:
        talk = self.talk
        kind = self.draw(st.sampled_from(["start", "tick", "tick", "cancel", "retract"]))
        if kind == "start":
            prompt = tuple(self.draw(st.lists(st.integers(0, 90), min_size=1, max_size=9)))
            count = self.draw(st.integers(0, 21 - len(prompt)))
            ends = tuple(self.draw(st.lists(st.integers(0, 96), max_size=3)))
            talk.start(f"r{len(talk.requests)}", SpeechRequest(prompt, count, ends))
        elif kind == "tick":
            for _ in range(self.draw(st.integers(1, 8))):
                talk.tick()
        elif kind == "cancel" and talk.requests:
            rid = self.draw(st.sampled_from(sorted(talk.requests)))
            if rid not in talk.ended:
                self.cancelled.add(rid)
            talk.loop.cancel(rid)
        elif kind == "retract":
            talk.loop.push_back_all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_item_8_5_12_whatever_happens_each_request_gives_what_it_gives_alone(data):
    life = Life(data.draw)
    for _ in range(data.draw(st.integers(1, 15))):
        life.act()
    talk = life.talk
    talk.finish()
    for rid, request in talk.requests.items():
        if rid not in life.cancelled:
            talk.check(rid)
        else:
            event = talk.ended[rid]
            whole = expected_speech(request)
            assert isinstance(event, Final)
            assert event.payload.wave == whole.wave[: len(event.payload.wave)]
