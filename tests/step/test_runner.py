"""The order in which resources are built and driven."""

from __future__ import annotations

import itertools

import pytest

from phalanx.errors import ConfigurationError
from phalanx.step.runner import dependency_order
from phalanx.testing.probe_resource import ProbeSpec

NODES = frozenset({"node"})


def spec(key: str, *needs: str) -> ProbeSpec:
    return ProbeSpec(key, NODES, needs=frozenset(needs))


def order(*specs: ProbeSpec) -> list[str]:
    return [one.key for one in dependency_order(specs)]


def test_dependencies_come_first_and_ties_by_key():
    specs = [spec("z"), spec("b", "z"), spec("a", "b", "z"), spec("c")]
    for permuted in itertools.permutations(specs):
        assert order(*permuted) == ["c", "z", "b", "a"]


def test_no_resources_is_fine():
    assert order() == []


def test_a_key_twice_is_refused():
    with pytest.raises(ConfigurationError, match="'kv' is declared twice"):
        order(spec("kv"), spec("other"), spec("kv"))


def test_an_unknown_dependency_names_it_and_what_there_is():
    with pytest.raises(ConfigurationError, match="'a' depends on 'kv', .* declared: a, b"):
        order(spec("a", "kv"), spec("b"))


@pytest.mark.parametrize(
    "specs",
    [
        [spec("a", "a")],
        [spec("a", "b"), spec("b", "a"), spec("c")],
        [spec("a", "b"), spec("b", "b")],
    ],
)
def test_a_circle_is_refused(specs):
    with pytest.raises(ConfigurationError, match="in a circle: a"):
        order(*specs)
