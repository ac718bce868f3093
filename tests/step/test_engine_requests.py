"""Loading, opening and closing requests, and what the engine asks of all its resources."""

from __future__ import annotations

import weakref

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.errors import ConfigurationError
from phalanx.step.engine import StepEngine
from phalanx.step.outcomes import AdmitOutcome, AdmitRuntimeError
from phalanx.step.resources.base import Resource
from phalanx.step.submodule import NodeSubmodule
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE, WALK
from tests.step.stepping import Stepping


def load(*specs: ProbeSpec, nodes=("one", "two")) -> StepEngine:
    engine = StepEngine(CpuBackend())
    engine.load_model({name: NodeSubmodule() for name in nodes}, specs)
    return engine


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([ProbeSpec("a", frozenset({"three"}))], r"'a' names nodes \['three'\]; there are"),
        ([ProbeSpec("a", frozenset())], r"'a' names nodes \[\]"),
        ([ProbeSpec("a", frozenset({"one"})), ProbeSpec("a", frozenset({"two"}))], "twice"),
        ([ProbeSpec("a", frozenset({"one"}), needs=frozenset({"b"}))], "depends on 'b'"),
    ],
)
def test_wrong_specs_are_refused(specs, message):
    with pytest.raises(ConfigurationError, match=message):
        load(*specs)


def test_each_node_is_bound_to_its_own_resources():
    bound = {}

    class Node(NodeSubmodule):
        def bind_node_resources(self, resources):
            bound[self.name] = dict(resources)

    nodes = {name: Node() for name in ("one", "two", "none")}
    for name, node in nodes.items():
        node.name = name
    engine = StepEngine(CpuBackend())
    both, one = frozenset({"one", "two"}), frozenset({"one"})
    engine.load_model(nodes, [ProbeSpec("shared", both), ProbeSpec("own", one)])
    assert {name: set(keys) for name, keys in bound.items()} == {
        "one": {"shared", "own"},
        "two": {"shared"},
        "none": set(),
    }
    assert bound["one"]["shared"] is bound["two"]["shared"] is engine.resource("shared")
    assert set(engine.nodes) == {"one", "two", "none"}


def test_a_request_is_opened_on_all_resources_and_opening_it_again_changes_nothing():
    log = []
    nodes = frozenset({"one"})
    engine = load(ProbeSpec("a", nodes, log), ProbeSpec("b", nodes, log))
    engine.add_request("x", "state", {})
    first = engine.row("x", 1).info
    engine.add_request("x", "other", {})
    assert engine.row("x", 1).info is first
    assert first.state == "state"
    assert not engine.at_rest()
    engine.remove_request("x")
    engine.remove_request("x")
    engine.remove_request("nobody")
    assert engine.at_rest()
    with pytest.raises(KeyError):
        engine.row("x", 1)


def test_every_node_forgets_a_removed_request():
    node = CacheReader()
    engine = cache_reader_engine(2, 2, node=node)
    engine.add_request("x", None, {})
    engine.remove_request("x")
    assert node.forgotten == ["x"]


def test_a_second_add_after_a_step_rewinds_nothing():
    stepping = Stepping(cache_reader_engine(8, 2))
    state = stepping.open("x", (1, 2, 3))
    for _ in range(3):
        stepping.step(x=0)
        stepping.engine.add_request("x", state, {})
    assert tuple(state.outputs) == expected_tokens((1, 2, 3), 3)
    stepping.close()


def test_what_resources_publish_is_kept_with_the_request():
    probe = ProbeSpec("probe", frozenset({NODE}))
    stepping = Stepping(cache_reader_engine(8, 2, probe=probe))
    stepping.open("x", (1, 2, 3))
    info = stepping.step(x=2).rows[0].info
    kv = info.published["kv"]
    assert kv.ranks[0]["main"].length == 2
    assert info.published == {
        "kv": kv,
        "positions": {"main": 2},
        "probe": "probe of x",
    }


def test_the_largest_batch_is_the_nodes_own():
    assert cache_reader_engine(2, 2).get_max_batch_size(NODE, WALK) is None
    engine = cache_reader_engine(2, 2, node=CacheReader(max_rows=3))
    assert engine.get_max_batch_size(NODE, WALK) == 3


def test_requests_fit_where_all_growing_resources_have_room():
    engine = cache_reader_engine(4, 2, probe=ProbeSpec("probe", frozenset({NODE})))
    engine.add_request("x", None, {})
    assert engine.fits(NODE, {"x": 4, "y": 4})
    assert not engine.fits(NODE, {"x": 4, "y": 5})


class Retrieving(Resource):
    """Answers what it was told."""

    def __init__(self, outcome: AdmitOutcome) -> None:
        self.outcome = outcome
        self.asked = []

    def admit_retrieve(self, rid, published):
        self.asked.append((rid, published))
        return self.outcome


@pytest.mark.parametrize(
    ("outcomes", "ok", "ready"),
    [
        ([AdmitOutcome(), AdmitOutcome()], True, True),
        ([AdmitOutcome(ready=False), AdmitOutcome()], True, False),
        ([AdmitOutcome(), AdmitOutcome(ready=False)], True, False),
        (
            [AdmitOutcome(ready=False), AdmitOutcome(False, reason=AdmitRuntimeError("x"))],
            False,
            True,
        ),
    ],
)
def test_a_request_is_ready_once_everything_has_landed(outcomes, ok, ready):
    resources = {str(index): Retrieving(outcome) for index, outcome in enumerate(outcomes)}

    class Spec(ProbeSpec):
        def build(self, info):
            return resources[self.key]

    engine = load(*(Spec(key, frozenset({"one"})) for key in resources))
    outcome = engine.check_ready("one", "x", {"0": "pages"})
    assert (outcome.ok, outcome.ready) == (ok, ready)
    assert resources["0"].asked == [("x", "pages")]
    assert resources["1"].asked == [("x", None)]
    assert engine.check_ready("two", "x", {}).ready


def test_memory_is_released_and_restored_by_tag():
    engine = cache_reader_engine(4, 2)
    keys = weakref.ref(engine.resource("kv").layer(0)[0])
    engine.release(frozenset({"weights"}))
    assert keys() is not None
    engine.release(frozenset({"kv_cache"}))
    assert keys() is None
    engine.restore(frozenset({"kv_cache"}))
    stepping = Stepping(engine)
    stepping.open("x", (1, 2, 3))
    assert stepping.finish("x") == {}
    assert tuple(stepping.states["x"].outputs) == expected_tokens((1, 2, 3), 3)
    stepping.close()


def test_a_step_on_released_memory_is_refused_for_good():
    engine = cache_reader_engine(4, 2)
    engine.release(frozenset({"kv_cache"}))
    stepping = Stepping(engine)
    for rid in "xy":
        stepping.open(rid, (1, 2, 3))
    reason = stepping.step(x=0, y=0).admit_error
    assert isinstance(reason, AdmitRuntimeError)
    assert reason.request_id is None, "all rows are concerned"
    assert stepping.step(x=0).admit_error.request_id == "x", "all rows, and there is one"


def test_shutdown_cleans_up_every_resource():
    log = []
    engine = load(ProbeSpec("a", frozenset({"one"}), log), ProbeSpec("b", frozenset({"two"}), log))
    engine.shutdown()
    assert sorted((call.key, call.verb) for call in log) == [("a", "cleanup"), ("b", "cleanup")]
