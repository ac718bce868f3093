"""Steps that are admitted and planned before their turn: promoted, stale, given up and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Fork, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AdmitOutcome, AllocationFailed
from phalanx.step.resources.kv_cache import KVCache
from phalanx.testing.probe_resource import ProbeResource, ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE, InjectedError
from tests.step.caches import in_flight
from tests.step.stepping import Stepping

REFUSED = AdmitOutcome(ok=False, reason=AllocationFailed("told to", 1, "a"))
PAGES = 40
PROMPTS = {"a": (3, 1, 4, 1, 5), "b": (9, 2, 6), "c": (5, 3, 5, 8, 9, 7, 9)}


class Probing(Stepping):
    """Requests on a node with a probe beside its cache, whose answers a test may set."""

    def __init__(self, node: CacheReader | None = None, backend: CpuBackend | None = None) -> None:
        self.log = []
        self.answers = {}
        probe = ProbeSpec("probe", frozenset({NODE}), self.log, self._react)
        self.node = node or CacheReader()
        super().__init__(
            cache_reader_engine(PAGES, 2, node=self.node, probe=probe, backend=backend)
        )
        for rid, prompt in PROMPTS.items():
            self.open(rid, prompt, count=3)

    def _react(self, verb, rids):
        answer = self.answers.get(verb)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def cache(self) -> KVCache:
        return self.engine.resource("kv")

    @property
    def probe(self) -> ProbeResource:
        return self.engine.resource("probe")

    def verbs(self) -> list[str]:
        """What the probe was asked since the last call, for steps."""
        verbs = [one.verb for one in self.log if one.verb not in ("ingest", "remove", "publish")]
        self.log.clear()
        return verbs

    def planned(self, **spans: int):
        """A batch that was planned ahead."""
        batch = self.batch(**spans)
        self.engine.prepare_inputs(batch)
        assert self.engine.pre_plan(batch)
        return batch

    def compute(self, batch) -> None:
        self.engine.exec(batch)
        self.engine.finalize(batch)
        for row in batch.live_rows():
            self.states[row.request_id].advance(row.span)
        self.engine.check_stop(batch)

    def check_nothing_is_held(self, pages: int) -> None:
        assert in_flight(self.cache) == []
        assert not self.probe.in_flight
        assert self.cache.num_free_pages == pages

    def check_outputs(self) -> None:
        """Everybody goes on to the outputs that each gives alone."""
        self.finish(*self.states)
        for rid, state in self.states.items():
            assert tuple(state.outputs) == expected_tokens(PROMPTS[rid], 3)
        self.close()


def test_item_8_5_2_a_step_that_was_planned_ahead_is_promoted():
    bench = Probing()
    batch = bench.planned(a=0, b=0, c=0)
    assert bench.verbs() == ["admit", "plan"]
    bench.compute(batch)
    assert bench.verbs() == ["begin", "commit"]
    assert batch.staged is None
    bench.check_outputs()


@pytest.mark.parametrize("change", ["dropped", "reordered", "other span"])
def test_item_8_5_2_defect_8_6_2_exec_itself_sees_a_stale_plan(change):
    """The plan of three rows used for two would put keys and values where they do not belong."""
    bench = Probing()
    batch = bench.planned(a=0, b=0, c=0)
    if change == "dropped":
        batch.drop_rows({"b"})
    elif change == "reordered":
        batch.register_inputs(batch.rows[::-1], batch.inputs[::-1])
    else:
        state = bench.states["c"]
        rows = (*batch.rows[:2], bench.engine.row("c", 2))
        batch.register_inputs(rows, (*batch.inputs[:2], state.take(2)))
    assert bench.engine.preplan_is_stale(batch)
    bench.verbs()
    bench.compute(batch)
    assert bench.verbs() == ["unadmit", "admit", "plan", "begin", "commit"]
    bench.check_outputs()


def test_a_batch_without_a_plan_is_not_stale():
    bench = Probing()
    assert not bench.engine.preplan_is_stale(bench.batch(a=0))
    assert not bench.engine.preplan_is_stale(bench.planned(a=0))


class Forking(CacheReader):
    """Copies each row's stream to a label of its own before every step."""

    def declare_step(self, walk, rows, inputs) -> SubmoduleStep:
        step = super().declare_step(walk, rows, inputs)
        forks = tuple(Fork(row.request_id, "main", "copy") for row in rows)
        forked = {key: replace(step.resources[key], pre_forks=forks) for key in ("kv", "positions")}
        return replace(step, resources={**step.resources, **forked})


def test_item_8_5_2_giving_a_plan_up_undoes_forks_labels_and_marks():
    bench = Probing(Forking())
    bench.step(a=0, b=0, c=0)
    lengths = {rid: bench.cache.stored_len(rid, "copy") for rid in PROMPTS}
    pages = bench.cache.num_free_pages
    batch = bench.planned(a=0, b=0, c=0)
    assert bench.cache.num_free_pages < pages
    assert in_flight(bench.cache) != []
    bench.engine.reset_pre_plan(batch)
    bench.check_nothing_is_held(pages)
    assert {rid: bench.cache.stored_len(rid, "copy") for rid in PROMPTS} == lengths
    bench.check_outputs()


def test_item_8_5_2_a_label_that_a_plan_invents_goes_with_it():
    bench = Probing(Forking())
    batch = bench.planned(a=2)
    assert set(bench.cache._table.of("a")) == {"main", "copy"}
    bench.engine.reset_pre_plan(batch)
    bench.check_nothing_is_held(PAGES)
    assert set(bench.cache._table.of("a")) == set()
    bench.close()


def test_defect_8_6_3_giving_a_plan_up_forgets_the_declared_step():
    """A row dropped after it must not come back by a step that was declared with it."""
    bench = Probing()
    batch = bench.planned(a=0, b=0)
    bench.engine.reset_pre_plan(batch)
    assert batch.staged is None
    batch.drop_rows({"b"})
    bench.compute(batch)
    assert bench.cache.stored_len("b") == 0
    assert bench.cache.stored_len("a") == len(PROMPTS["a"])
    bench.check_outputs()


def test_item_8_5_2_a_refused_plan_holds_nothing_and_exec_reports_it():
    bench = Probing()
    bench.answers["admit"] = REFUSED
    batch = bench.batch(a=0, b=0)
    bench.engine.prepare_inputs(batch)
    assert not bench.engine.pre_plan(batch)
    bench.check_nothing_is_held(PAGES)
    assert batch.admit_error is None
    bench.engine.exec(batch)
    assert batch.admit_error is REFUSED.reason
    bench.answers.clear()
    bench.check_outputs()


@pytest.mark.parametrize("verb", ["admit", "plan"])
def test_what_is_raised_ahead_of_time_is_undone_and_raised_again_in_its_turn(verb):
    bench = Probing()
    bench.answers[verb] = InjectedError(verb)
    batch = bench.batch(a=0, b=0)
    bench.engine.prepare_inputs(batch)
    assert not bench.engine.pre_plan(batch)
    bench.check_nothing_is_held(PAGES)
    assert batch.failed_requests == {}
    bench.engine.exec(batch)
    assert set(batch.failed_requests) == {"a", "b"}
    bench.check_nothing_is_held(PAGES)


@pytest.mark.parametrize("verb", ["begin", "commit"])
def test_defect_8_6_4_a_promoted_step_that_fails_leaves_no_marks(verb):
    bench = Probing()
    batch = bench.planned(a=0, b=0)
    bench.answers[verb] = InjectedError(verb)
    bench.engine.exec(batch)
    assert set(batch.failed_requests) == {"a", "b"}
    assert in_flight(bench.cache) == []
    assert not bench.probe.in_flight


def test_a_batch_may_be_planned_again():
    bench = Probing()
    batch = bench.planned(a=0, b=0)
    batch.drop_rows({"a"})
    assert bench.engine.pre_plan(batch)
    assert not bench.engine.preplan_is_stale(batch)
    bench.compute(batch)
    bench.check_outputs()


def test_rows_without_a_common_forward_are_not_planned_ahead():
    bench = Probing(CacheReader(batched=False))
    batch = bench.batch(a=0, b=0)
    bench.engine.prepare_inputs(batch)
    assert not bench.engine.pre_plan(batch)
    single = bench.batch(c=0)
    bench.engine.prepare_inputs(single)
    assert bench.engine.pre_plan(single)
    bench.compute(single)
    bench.compute(batch)
    bench.check_outputs()


def test_the_next_step_is_planned_on_what_this_one_has_committed():
    """While nobody has looked at this step's outputs yet: the row is prepared `ahead`."""
    bench = Probing()
    first = bench.batch(a=0)
    bench.engine.prepare_inputs(first)
    bench.engine.exec(first)
    second = bench.batch()
    second.rows = (bench.engine.row("a", 1, ahead=first.rows[0].span),)
    bench.engine.prepare_inputs(second)
    assert bench.engine.pre_plan(second)
    bench.engine.thread_outputs(second, first.outputs)
    assert not bench.engine.preplan_is_stale(second)
    bench.engine.exec(second)
    for batch in (first, second):
        bench.engine.finalize(batch)
        for row in batch.live_rows():
            bench.states[row.request_id].advance(row.span)
        bench.engine.check_stop(batch)
    assert tuple(bench.states["a"].outputs) == expected_tokens(PROMPTS["a"], 2)


def test_a_row_that_the_step_before_gave_nothing_leaves_and_makes_the_plan_stale():
    bench = Probing()
    first = bench.batch(a=0, b=0)
    bench.engine.prepare_inputs(first)
    bench.engine.exec(first)
    second = bench.batch()
    second.rows = tuple(bench.engine.row(row.request_id, 1, row.span) for row in first.rows)
    bench.engine.prepare_inputs(second)
    assert bench.engine.pre_plan(second)
    column = first.outputs[0].columns["token"]
    half = replace(column, request_ids=column.request_ids[:1], values=column.values[:1])
    bench.engine.thread_outputs(second, [replace(first.outputs[0], columns={"token": half})])
    assert second.request_ids == ("a",)
    assert second.skipped == {"b"}
    assert bench.engine.preplan_is_stale(second)
    bench.engine.exec(second)
    assert second.failed_requests == {}
    assert bench.cache.stored_len("b") == len(PROMPTS["b"])


class Unthreadable(CacheReader):
    def thread_outputs(self, walk, rows, inputs, before):
        raise InjectedError("thread")


def test_a_node_that_cannot_thread_fails_the_rows_ahead_and_no_others():
    bench = Probing(Unthreadable())
    bench.step(a=0)
    batch = bench.batch(b=0)
    batch.rows = (bench.engine.row("a", 1, 1), *batch.rows)
    bench.engine.prepare_inputs(batch)
    bench.engine.thread_outputs(batch, ())
    assert set(batch.failed_requests) == {"a"}
    assert batch.request_ids == ("b",)


class Ordered(CpuBackend):
    """Writes streams, events and waits into the log of the probe."""

    def __init__(self) -> None:
        super().__init__()
        self.log = []

    def record_event(self):
        self.log.append("record")
        return super().record_event()

    def wait_event(self, event):
        self.log.append("wait")


def test_rule_2_17_4_a_promoted_step_waits_for_its_plans_before_it_begins():
    backend = Ordered()
    bench = Probing(backend=backend)
    backend.log = bench.log
    batch = bench.planned(a=0)
    bench.engine.exec(batch)
    calls = [one if isinstance(one, str) else one.verb for one in bench.log]
    wanted = ["admit", "plan", "record", "wait", "begin", "commit"]
    assert [call for call in calls if call in wanted][:6] == wanted


class LateSpec(ProbeSpec):
    """A probe that cannot plan ahead."""

    def build(self, info):
        return LateProbe(self)


class LateProbe(ProbeResource):
    plans_ahead = False


def test_a_resource_that_cannot_plan_ahead_plans_in_the_steps_turn():
    log = []
    probe = LateSpec("probe", frozenset({NODE}), log)
    stepping = Stepping(cache_reader_engine(16, 2, probe=probe))
    stepping.open("a", (1, 2, 3))
    assert stepping.engine.can_pre_plan(NODE)
    batch = stepping.batch(a=0)
    stepping.engine.prepare_inputs(batch)
    log.clear()
    assert stepping.engine.pre_plan(batch)
    assert [one.verb for one in log] == ["admit"]
    stepping.engine.exec(batch)
    assert [one.verb for one in log] == ["admit", "plan", "begin", "commit"]


def test_what_plans_ahead_cannot_depend_on_what_does_not():
    nodes = frozenset({NODE})
    late = LateSpec("late", nodes)
    early = ProbeSpec("early", nodes, needs=frozenset({"late"}))
    engine = StepEngine(CpuBackend())
    with pytest.raises(ConfigurationError, match="'early' plans ahead but depends on 'late'"):
        engine.load_model({NODE: CacheReader()}, [early, late])


def test_a_node_of_which_nothing_plans_ahead_says_so():
    nodes = frozenset({NODE})
    engine = StepEngine(CpuBackend())
    engine.load_model({NODE: _Bare()}, [LateSpec("late", nodes)])
    assert not engine.can_pre_plan(NODE)


class _Bare(CacheReader):
    def bind_node_resources(self, resources) -> None:
        """It has no cache."""
