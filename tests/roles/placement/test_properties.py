"""Whatever is asked: a plan breaks no rule, by a checker that knows nothing of the planner, and what
is refused is refused for a reason that can be read.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.occupancy import Occupancy
from phalanx.roles.placement.planner import plan
from phalanx.roles.placement.reservations import shares
from phalanx.schema.job_placement import TRAINER
from tests.roles.placement.requests import (
    DECOUPLED,
    DEFER,
    SPLIT,
    external,
    group,
    nodes,
    request,
    role,
    violations,
)

NAMES = ("rollout", "genrm", "teacher", "extra")
MODES = st.sampled_from([DECOUPLED, SPLIT, DEFER])
FIELD = re.compile(r"(placement|roles)\.[\w.\[\]-]+")
WAYS = re.compile(r"\b(give|set|say|leave|choose|change|add|name|end|did you mean)\b")


@st.composite
def groups(draw, devices: int):
    """On nodes of so many devices, mostly of a shape that one of them can hold."""
    kind = draw(st.integers(0, 15))
    replicas = draw(st.integers(0, 3))
    if kind == 0:
        return external(replicas)
    if kind == 1:
        spread = draw(st.sampled_from([1, 2, 3]))
        return group(replicas, draw(st.integers(1, 9)), nodes_per_replica=spread)
    if kind == 2:
        spread = draw(st.integers(2, 3))
        return group(1, spread * devices, nodes_per_replica=spread)
    ranks = draw(st.integers(1, devices))
    if kind in (3, 4):
        first = draw(st.integers(0, 2 * devices))
        return group(replicas, ranks, bundles=range(first, first + ranks * replicas))
    if kind == 5:
        bundles = draw(st.lists(st.integers(0, 9), max_size=6, unique=draw(st.booleans())))
        return group(replicas, ranks, bundles=bundles)
    return group(replicas, ranks)


@st.composite
def requests(draw):
    mode = draw(MODES)
    devices = draw(st.integers(1, 6))
    sizes = [devices] * draw(st.integers(0, 8))
    if draw(st.integers(0, 4)) == 0:
        sizes = draw(st.lists(st.integers(0, 6), max_size=8))
    roles = [
        role(name, *draw(st.lists(groups(devices), min_size=1, max_size=2)))
        for name in NAMES[: draw(st.integers(1, 4))]
    ]
    return request(
        mode,
        nodes(*sizes),
        *roles,
        trainer_devices=draw(st.integers(0, 5)),
        phases=draw(schedules([spec.role for spec in roles])),
        external_groups={"genrm"} if mode is DECOUPLED and len(roles) > 1 else (),
    )


@st.composite
def schedules(draw, names: list[str]):
    """No phases, those in which everybody has a turn, or any."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return {}
    phases = {}
    for number in range(draw(st.integers(1, 4))):
        some = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
        phases[f"p{number}"] = tuple(draw(some))
    if kind == 1:
        return phases
    left = [name for name in names if not any(name in phase for phase in phases.values())]
    phases.update({f"of_{name}": (name,) for name in left})
    return {**phases, "train": (TRAINER,)}


def keeps_every_rule(asked):
    try:
        made = plan(asked)
    except ConfigurationError as error:
        assert FIELD.search(str(error)), error
        assert WAYS.search(str(error)), error
        return
    if made.groups:
        assert [one for one in violations(asked, made) if "placement, or one too" not in one] == []
    reserved = shares(made)
    for placed in made.groups:
        for bundle in placed.bundles:
            users = [user for user in made.users() if bundle in made.bundles_of(user)]
            assert sum(reserved[user] for user in users) <= 1.0


def at(max_examples: int):
    return settings(max_examples=max_examples, deadline=None)


def test_i66_i68_i69_i70_no_plan_breaks_a_rule_and_no_refusal_is_mute():
    at(80)(given(requests())(keeps_every_rule))()


@pytest.mark.long
def test_no_plan_of_many_breaks_a_rule():
    at(300)(given(requests())(keeps_every_rule))()


SIZES = st.sampled_from([1, 2, 4])


@at(200)
@given(
    mode=MODES,
    wanted=st.lists(st.tuples(SIZES, st.integers(1, 4)), min_size=1, max_size=4),
    num_nodes=st.integers(1, 6),
    trainer=st.integers(0, 6),
)
def test_i66_engines_of_fitting_sizes_are_placed_whenever_the_devices_suffice(
    mode, wanted, num_nodes, trainer
):
    """Powers of two on nodes of four leave no gaps, so that counting decides."""
    roles = [
        role(name, group(replicas, size))
        for name, (size, replicas) in zip(NAMES, wanted, strict=False)
    ]
    budgets = [size * replicas for size, replicas in wanted] + [trainer]
    needed = max(budgets) if mode is DEFER else sum(budgets)
    asked = request(mode, nodes(*[4] * num_nodes), *roles, trainer_devices=trainer)
    try:
        made = plan(asked)
    except ConfigurationError:
        assert needed > 4 * num_nodes
    else:
        assert needed <= 4 * num_nodes
        assert violations(asked, made) == []


@at(200)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    taken=st.sets(st.integers(0, 24)),
    size=st.integers(1, 5),
)
def test_the_first_free_devices_are_those_that_a_search_finds(sizes, taken, size):
    cluster = nodes(*sizes)
    occupancy = Occupancy(cluster, ["p", "q"])
    mine = [device for device in taken if device < cluster.num_devices]
    occupancy.take(["p"], mine[::2])
    occupancy.take(["q"], mine[1::2])
    found, start = [], 0
    for devices in sizes:
        position = start
        while position + size <= start + devices:
            engine = list(range(position, position + size))
            if not set(engine) & set(mine):
                found.append(engine)
                position += size
            else:
                position += 1
        start += devices
    for count in range(len(found) + 2):
        expected = sum(found[:count], []) if count <= len(found) else None
        assert occupancy.engines(["p", "q"], size, count, 1) == expected
