"""A loop that looks ahead: what overlaps, and what becomes of a step that was begun too early."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.loop.outlook import Outlook
from phalanx.loop.scheduler import Budget
from phalanx.schema.events import Final
from phalanx.step.outputs import NodeOutputs
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader
from phalanx.testing.token_request import NODE, InjectedError, TokenRequest
from phalanx.testing.toy_decoder import toy_decoder_engine
from tests.loop import test_toy_decoder_loop as decoder
from tests.loop.ledger import Bench
from tests.loop.surprising import StoppingRequest, WanderingRequest, check_outputs, due_tokens
from tests.loop.threaded import ThreadedLoop


def meet(event: threading.Event) -> None:
    """Wait for what must happen meanwhile; a loop that does not overlap fails here."""
    assert event.wait(20), "it does not happen meanwhile"


class Meeting(CacheReader):
    """Looks at a step's values only when the next forward runs, and ends that one only then."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.looked = threading.Event(), threading.Event()

    def forward(self, prepared):
        outputs = super().forward(prepared)
        if self.num_forwards == 2:
            self.runs.set()
            meet(self.looked)
        return outputs

    def check_stop(self, row, outputs):
        if not self.looked.is_set():
            meet(self.runs)
            self.looked.set()
        return super().check_stop(row, outputs)


def test_item_8_5_9_values_are_looked_at_while_the_next_step_is_computed(benches):
    bench = benches(node=Meeting())
    bench.start("a", 3, 4)
    bench.finish()
    check_outputs(bench)


class Gathered(NodeOutputs):
    """Outputs that are copied only once the step after theirs is planned."""

    planned = threading.Event()

    def owned(self):
        meet(Gathered.planned)
        return super().owned()


class Gathering(CacheReader):
    def forward(self, prepared):
        outputs = super().forward(prepared)
        return Gathered(outputs.columns) if self.num_forwards == 1 else outputs


def test_item_8_5_2_the_next_step_is_planned_while_outputs_are_gathered(benches):
    Gathered.planned.clear()
    plans = []

    def react(verb, rids):
        if verb == "plan":
            plans.append(rids)
            if len(plans) == 2:
                Gathered.planned.set()

    bench = benches(node=Gathering(), probe=ProbeSpec("probe", frozenset({NODE}), react=react))
    bench.start("a", 3, 4)
    bench.finish()
    check_outputs(bench)


def test_a_step_is_admitted_ahead_only_after_the_one_before_it_is_committed(benches):
    log = []
    bench = benches(probe=ProbeSpec("probe", frozenset({NODE}), log))
    for index in range(3):
        bench.start(f"r{index}", 3, 4)
    bench.finish()
    verbs = [one.verb for one in log if one.verb in ("admit", "plan", "begin", "commit")]
    assert verbs == ["admit", "plan", "begin", "commit"] * (len(verbs) // 4)
    assert bench.loop.num_ahead == bench.loop.num_steps - 1
    assert bench.loop.num_discarded == 0, "all ends were foreseen"


def test_item_8_5_9_a_late_stop_costs_exactly_one_discarded_step(benches):
    bench = benches()
    bench.start("a", 4, 30, kind=StoppingRequest)
    bench.finish()
    given = len(bench.output("a"))
    assert given < 30
    assert bench.engine._nodes[NODE].submodule.num_forwards == given + 1
    assert bench.loop.num_discarded == 1
    check_outputs(bench)


def test_item_8_5_9_a_late_stop_leaves_the_others_alone_and_nothing_behind(benches):
    bench = benches(num_pages=200)
    for index in range(6):
        bench.start(f"r{index}", 4, 12, kind=StoppingRequest if index % 2 else TokenRequest)
    bench.finish()
    early = [rid for rid, state in bench.states.items() if len(bench.output(rid)) < state.count]
    assert bench.loop.num_discarded == len(early) > 0
    check_outputs(bench)
    for rid, state in bench.states.items():
        assert tuple(state.outputs) == bench.output(rid), "what was discarded was shown to it"


def test_a_request_may_come_again_at_once_under_the_id_of_one_that_stopped_late(benches):
    bench = benches()
    bench.start("a", 4, 30, kind=StoppingRequest)
    bench.start("b", 4, 30)
    while "a" not in bench.ledger.ended:
        bench.tick()
    bench.start("a", 4, 5)
    bench.finish()
    assert bench.output("a") == due_tokens(bench.states["a"])
    check_outputs(bench)


def test_item_8_5_9_a_request_that_goes_elsewhere_is_not_led_astray(benches):
    bench = benches(num_pages=200)
    for index in range(4):
        bench.start(f"r{index}", 4, 12, kind=WanderingRequest)
    bench.finish()
    assert bench.loop.num_discarded > 0
    check_outputs(bench)


class Walks(CacheReader):
    """Remembers the requests of each step by walk."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def preprocess(self, engine, inputs):
        self.steps.append((engine.walk, tuple(row.request_id for row in engine.rows)))
        return super().preprocess(engine, inputs)


def test_item_8_5_9_other_ready_work_is_not_passed_over(benches):
    """Each step of one walk is followed by one of the other as long as both are wanted."""
    node = Walks()
    bench = benches(node=node)
    for rid, walk in (("a", "w"), ("b", "v"), ("c", "w")):
        bench.start(rid, 2, 6, place=(NODE, walk))
    bench.finish()
    walks = [walk for walk, _ in node.steps]
    assert walks[:10] == ["w", "v"] * 5
    assert bench.loop.num_ahead > 0
    check_outputs(bench)


def test_item_8_5_9_after_so_many_steps_ahead_one_is_chosen_by_all_that_is_known(benches):
    bench = benches()
    loop = ThreadedLoop(bench.engine, Budget(64, 8), max_consecutive=2)
    loop.start("a", TokenRequest((1, 2, 3), 9))
    while loop.busy:
        loop.tick()
    assert (loop.num_steps, loop.num_ahead) == (9, 6)
    loop.close()


class Unforeseeing(TokenRequest):
    def work_after(self, span):
        return Outlook.UNKNOWN


class Sequential(CacheReader):
    speculates = False


@pytest.mark.parametrize(
    ("node", "kind"), [(Sequential, TokenRequest), (CacheReader, Unforeseeing)]
)
def test_both_the_node_and_the_request_must_allow_it(benches, node, kind):
    bench = benches(node=node())
    bench.start("a", 3, 4, kind=kind)
    bench.start("b", 3, 4)
    bench.finish()
    assert bench.loop.num_ahead == 0
    check_outputs(bench)


def test_new_requests_join_a_step_that_is_prepared_ahead(benches):
    node = Walks()
    bench = benches(node=node)
    bench.start("a", 3, 9)
    bench.tick()
    bench.start("b", 3, 5)
    bench.finish()
    assert bench.loop.num_ahead == bench.loop.num_steps - 1
    assert ("generate", ("a", "b")) in node.steps
    check_outputs(bench)


@pytest.mark.parametrize("how", ["cancel", "fail", "drop"])
def test_a_request_that_is_ended_in_flight_ends_once_and_frees_all(benches, how):
    bench = benches()
    for rid in "abc":
        bench.start(rid, 3, 6)
    bench.tick()
    bench.tick()
    if how == "cancel":
        bench.loop.cancel("b")
    elif how == "fail":
        bench.loop.fail("b", InjectedError("told to"))
    else:
        bench.ledger.live.discard("b")
        bench.loop.drop("b")
    bench.finish()
    if how == "cancel":
        event = bench.ledger.ended["b"]
        assert isinstance(event, Final)
        assert event.cancelled
    elif how == "fail":
        assert str(bench.error("b")) == "told to"
    for rid in "ac":
        assert bench.output(rid) == due_tokens(bench.states[rid])


def test_cancelling_everybody_in_flight_leaves_nothing(benches):
    bench = benches()
    for rid in "abc":
        bench.start(rid, 3, 6)
    bench.tick()
    bench.loop.cancel_all()
    assert bench.loop.busy
    bench.finish(max_ticks=1)


def test_a_pause_lands_the_step_in_flight_first(benches):
    bench = benches()
    bench.start("a", 3, 6)
    bench.tick()
    bench.loop.paused = True
    steps, computed = bench.loop.num_steps, bench.states["a"].computed
    assert bench.cache.stored_len("a") == computed
    bench.tick()
    assert not bench.loop.busy
    assert (bench.loop.num_steps, bench.states["a"].computed) == (steps, computed)
    bench.loop.push_back_all()
    assert bench.cache.used_tokens == 0
    bench.loop.paused = False
    bench.finish()
    check_outputs(bench)


def test_two_runs_compute_the_same_steps(benches):
    runs = []
    for _ in range(2):
        node = Walks()
        bench = benches(num_pages=12, page_size=2, node=node, tokens=8)
        for index in range(7):
            kind = StoppingRequest if index % 2 else TokenRequest
            bench.start(f"r{index}", 3 + index, 6, kind=kind)
        bench.finish()
        check_outputs(bench)
        runs.append(node.steps)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("pages", "tokens", "running"), [(200, 512, 8), (200, 5, 8), (8, 16, 8)])
def test_item_8_5_12_a_sampling_decoder_gives_what_it_gives_step_by_step(pages, tokens, running):
    """Draws, penalties and token histories go on with tokens that the host has not seen yet."""
    found = []
    for kind in ({}, {"kind": ThreadedLoop}):
        engine = toy_decoder_engine(TorchOperators(), pages, 4)
        bench = Bench(engine, tokens=tokens, running=running, **kind)
        for index in range(len(decoder.NAMES)):
            decoder.start(bench, index)
        bench.finish()
        bench.loop.close()
        found.append(bench)
    assert found[1].loop.num_ahead > 0
    for rid in decoder.NAMES:
        assert found[1].output(rid) == found[0].output(rid)
        torch.testing.assert_close(
            decoder.logits(found[1], rid), decoder.logits(found[0], rid), rtol=1e-5, atol=1e-5
        )
