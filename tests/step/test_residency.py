"""Moving whole requests over several resources, and what `check_ready` says of it."""

from __future__ import annotations

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AdmitOutcome, NotReady, RequestOffloading
from phalanx.step.resources.base import Evictable, Resource
from phalanx.step.submodule import NodeSubmodule
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine
from tests.step.stepping import Stepping


class Shelf(Resource, Evictable):
    """Holds `size` of every request; `room` is what fits on its device side, `host` beside it."""

    def __init__(self, size: int, *, room: int = 100, host: int = 100) -> None:
        self.size, self.room, self.host = size, room, host
        self.away: set[str] = set()
        self.calls: list[str] = []

    def is_offloaded(self, rid):
        return rid in self.away

    def reclaimable(self, rid):
        return 0 if rid in self.away else self.size

    def offload(self, rid):
        self.calls.append("offload")
        if rid in self.away or self.size > self.host:
            return 0
        self.away.add(rid)
        return self.size

    def reload(self, rid):
        self.calls.append("reload")
        if self.size > self.room:
            return False
        self.away.discard(rid)
        return True


class Retrieving(Resource):
    """Not ready for anything."""

    def __init__(self) -> None:
        self.num_asked = 0

    def admit_retrieve(self, rid, published):
        self.num_asked += 1
        return AdmitOutcome(ready=False)


def load(nodes=("one", "two"), owners=None, **resources) -> StepEngine:
    class Spec(ProbeSpec):
        def build(self, info):
            return resources[self.key]

    engine = StepEngine(CpuBackend())
    owners = owners or {}
    specs = [Spec(key, frozenset(owners.get(key, nodes))) for key in resources]
    engine.load_model({name: NodeSubmodule() for name in nodes}, specs)
    return engine


def test_what_moves_is_the_sum_over_the_resources_that_can():
    engine = load(a=Shelf(3), b=Shelf(4), c=Resource())
    residency = engine.residency
    assert residency.reclaimable("one", "x") == 7
    assert residency.offload("x") == 7
    assert residency.is_offloaded("x")
    assert not residency.is_offloaded("y")
    assert (residency.offload("x"), residency.reclaimable("one", "x")) == (0, 0)
    assert residency.reload("x")
    assert not residency.is_offloaded("x")


def test_where_nothing_can_move_zero_says_so():
    engine = load(a=Shelf(3, host=0), c=Resource())
    assert engine.residency.offload("x") == 0
    assert not engine.residency.is_offloaded("x")


def test_a_node_is_evictable_if_one_of_its_resources_is():
    engine = load(owners={"a": {"one"}, "c": {"two"}}, a=Shelf(3), c=Resource())
    assert engine.residency.evictable("one")
    assert not engine.residency.evictable("two")


def test_reclaimable_counts_the_resource_that_ran_out_and_no_other():
    engine = load(
        owners={"a": {"one"}, "b": {"one"}, "d": {"two"}}, a=Shelf(3), b=Shelf(4), d=Shelf(9)
    )
    reclaimable = engine.residency.reclaimable
    assert reclaimable("one", "x") == 7
    assert reclaimable("one", "x", {"b"}) == 4
    assert reclaimable("one", "x", {"d"}) == 0, "it is not of this node"
    assert reclaimable("two", "x") == 9
    assert reclaimable("one", "x", set()) == 0


def test_priority_is_that_of_one_resource():
    engine = load(a=Shelf(3), b=Shelf(4), c=Resource())
    priorities = [engine.residency.offload_priority("x", key) for key in ("a", "b", "c", "none")]
    assert priorities == [3.0, 4.0, 0.0, 0.0]


def test_item_8_5_5_a_reload_that_one_resource_refuses_leaves_all_away():
    a, b = Shelf(3), Shelf(4)
    engine = load(a=a, b=b)
    engine.residency.offload("x")
    b.room = 0
    assert not engine.residency.reload("x")
    assert a.away == b.away == {"x"}
    b.room = 9
    assert engine.residency.reload("x")
    assert not a.away | b.away


def test_a_reload_asks_only_those_that_hold_something_away():
    a, b = Shelf(3), Shelf(4, host=0)
    engine = load(a=a, b=b)
    engine.residency.offload("x")
    assert engine.residency.reload("x")
    assert b.calls == ["offload"]


@pytest.mark.parametrize("room", [0, 9])
def test_item_8_5_5_check_ready_brings_a_request_back_before_it_imports(room):
    shelf, retrieving = Shelf(3), Retrieving()
    engine = load(shelf=shelf, retrieving=retrieving)
    engine.residency.offload("x")
    shelf.room = room
    outcome = engine.check_ready("one", "x", {})
    if room:
        assert (outcome.ok, outcome.ready, retrieving.num_asked) == (True, False, 1)
        return
    assert isinstance(outcome.reason, RequestOffloading)
    assert outcome.reason.request_id == "x"
    assert retrieving.num_asked == 0
    assert shelf.is_offloaded("x")


def test_item_8_5_7_a_step_with_an_offloaded_row_leaves_nothing_behind():
    stepping = Stepping(cache_reader_engine(8, 2, host_pages=8))
    for rid in "xy":
        stepping.open(rid, (1, 2, 3))
    stepping.step(x=0, y=0)
    assert stepping.engine.residency.offload("y") == 2
    reason = stepping.step(x=0, y=0).admit_error
    assert isinstance(reason, RequestOffloading)
    assert reason.request_id == "y"
    assert stepping.engine.residency.offload("x") == 2, "x is not in flight"
    for rid in "xy":
        assert stepping.engine.check_ready("toy", rid, {}).ready
    assert stepping.finish("x", "y") == {}
    stepping.close()


def test_defect_8_6_6_a_step_that_is_not_ready_is_refused_and_takes_nothing():
    def react(verb, rids):
        return AdmitOutcome(ready=False) if verb == "admit" and waiting else None

    waiting = True
    probe = ProbeSpec("probe", frozenset({"toy"}), react=react)
    stepping = Stepping(cache_reader_engine(8, 2, probe=probe))
    stepping.open("x", (1, 2, 3))
    batch = stepping.step(x=0)
    assert batch.admit_error == NotReady("resource 'probe' is not ready", "x")
    assert batch.failed_resource == "probe"
    assert stepping.engine.resource("kv").num_free_pages == 8
    waiting = False
    assert stepping.finish("x") == {}
    stepping.close()


@pytest.mark.parametrize("verb", ["admit", "plan", "begin", "commit"])
@pytest.mark.parametrize("batched", [True, False])
def test_defect_8_6_4_what_raises_between_admit_and_commit_leaves_its_rows_movable(batched, verb):
    def react(called, rids):
        if called == verb and faulty:
            raise ValueError(verb)

    faulty = False
    probe = ProbeSpec("probe", frozenset({"toy"}), react=react)
    engine = cache_reader_engine(
        16, 2, host_pages=16, node=CacheReader(batched=batched), probe=probe
    )
    stepping = Stepping(engine)
    for rid in "xy":
        stepping.open(rid, (1, 2, 3))
    stepping.step(x=0, y=0)
    faulty = True
    assert set(stepping.step(x=0, y=0).failed_requests) == {"x", "y"}
    faulty = False
    assert engine.residency.offload("x") == engine.residency.offload("y") == 2
    stepping.close()
