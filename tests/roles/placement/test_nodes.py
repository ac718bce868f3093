"""Engines and the borders of nodes: none straddles one, a larger one fills whole nodes."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.planner import plan
from tests.roles.placement.requests import (
    DECOUPLED,
    DEFER,
    SPLIT,
    group,
    nodes,
    request,
    role,
    violations,
    where,
)

IN_ROLLOUT = "roles.rollout.models.rollout-model"


def test_i68_an_engine_that_fits_a_node_does_not_straddle_two():
    asked = request(SPLIT, nodes(4, 4), role("rollout", group(2, 3)), role("genrm", group(2, 1)))
    made = plan(asked)
    assert violations(asked, made) == []
    assert where(made) == {
        "rollout-model/0": ["n0:0", "n0:1", "n0:2"],
        "rollout-model/1": ["n1:0", "n1:1", "n1:2"],
        "genrm-model/0": ["n0:3"],
        "genrm-model/1": ["n1:3"],
    }


def test_i68_an_engine_larger_than_a_node_fills_whole_ones():
    asked = request(
        SPLIT,
        nodes(2, 4, 4, 4, 4),
        role("genrm"),
        role("rollout", group(2, 8, nodes_per_replica=2)),
    )
    made = plan(asked)
    assert violations(asked, made) == []
    assert where(made)["rollout-model/0"][::4] == ["n1:0", "n2:0"]
    assert where(made)["rollout-model/1"][::4] == ["n3:0", "n4:0"]


def test_i68_what_stands_on_a_part_of_a_node_makes_it_no_whole_one():
    asked = request(
        SPLIT, nodes(2, 2, 2), role("genrm"), role("rollout", group(1, 4, nodes_per_replica=2))
    )
    made = plan(asked)
    assert where(made)["rollout-model/0"] == ["n1:0", "n1:1", "n2:0", "n2:1"]


def test_i68_large_engines_go_first_where_the_order_of_the_file_leaves_gaps():
    gaps = request(SPLIT, nodes(4, 2), role("genrm", group(1, 2)), role("rollout", group(1, 4)))
    assert violations(gaps, plan(gaps)) == []
    assert where(plan(gaps))["genrm-model/0"] == ["n1:0", "n1:1"]


def test_i70_roles_that_share_phases_in_a_chain_find_bundles():
    phases = {"p": ("rollout", "genrm"), "q": ("genrm", "teacher"), "r": ("teacher", "student")}
    roles = (
        role("rollout", group(2)),
        role("student", group(2)),
        role("genrm", group(2)),
        role("teacher", group(2)),
    )
    asked = request(DEFER, nodes(4), *roles, phases=phases)
    assert violations(asked, plan(asked)) == []


@pytest.mark.parametrize(
    ("cluster", "asked_group", "says"),
    [
        (
            nodes(4, 4),
            group(1, 8),
            f"{IN_ROLLOUT}.ranks=8 is more than a node's 4 devices, and nodes=1; set nodes to 2",
        ),
        (nodes(4, 4), group(1, 6), "set ranks to a multiple of a node's devices, set ranks to at"),
        (
            nodes(4, 4),
            group(1, 4, nodes_per_replica=2),
            f"{IN_ROLLOUT}.nodes=2 puts 2 of ranks=4 on a node, and nodes have 4 devices; an engine"
            " over several nodes uses whole ones, a smaller one stays on one: set nodes to 1",
        ),
        (
            nodes(4, 4, 4),
            group(1, 9, nodes_per_replica=3),
            f"{IN_ROLLOUT}.nodes=3 puts 3 of ranks=9 on a node",
        ),
        (
            nodes(4, 4),
            group(1, 6, nodes_per_replica=4),
            f"{IN_ROLLOUT}.nodes=4 does not divide ranks=6",
        ),
        (
            nodes(),
            group(1, 4, nodes_per_replica=2),
            f"{IN_ROLLOUT}.nodes=2, and placement says nothing of nodes; give placement.nodes and",
        ),
        (nodes(4, 4), group(2, 3, bundles=[0, 1, 2, 3, 4, 5]), "as a node begins at bundle 4"),
        (nodes(4, 4), group(1, 3, bundles=[0, 1, 3]), "not neighbours in ascending order"),
        (nodes(4, 4), group(1, 2, bundles=[1, 0]), "not neighbours in ascending order"),
        (
            nodes(2, 2, 2),
            group(1, 4, bundles=[1, 2, 4, 5], nodes_per_replica=2),
            "nodes=2, and it does not fill whole nodes",
        ),
        (
            nodes(2, 2, 2),
            group(1, 4, bundles=[4, 5, 0, 1], nodes_per_replica=2),
            "its nodes are not in ascending order",
        ),
    ],
)
def test_i68_engines_across_a_border_are_refused(cluster, asked_group, says):
    with pytest.raises(ConfigurationError) as refused:
        plan(request(SPLIT, cluster, role("rollout", asked_group)))
    assert says in str(refused.value)


def test_i68_nodes_without_devices_hold_no_engine():
    with pytest.raises(ConfigurationError) as refused:
        plan(request(SPLIT, nodes(0, 0), role("rollout", group())))
    assert str(refused.value) == (
        "placement.nodes have no devices; say how many in placement.devices_per_node, or in the list"
        " of nodes"
    )


def test_i68_engines_that_fit_only_the_smallest_gaps_are_placed_there():
    roles = role("rollout", group(1, 3)), role("genrm", group(2, 2))
    asked = request(SPLIT, nodes(4, 3), *roles)
    made = plan(asked)
    assert violations(asked, made) == []
    assert where(made) == {
        "rollout-model/0": ["n1:0", "n1:1", "n1:2"],
        "genrm-model/0": ["n0:0", "n0:1"],
        "genrm-model/1": ["n0:2", "n0:3"],
    }


def test_i68_gaps_that_no_engine_fits_are_refused_as_such():
    asked = request(SPLIT, nodes(4, 4), role("rollout", group(2, 3)), role("genrm", group(1, 2)))
    with pytest.raises(ConfigurationError) as refused:
        plan(asked)
    message = str(refused.value)
    assert "replicas=1 of ranks=2 do not fit: there are devices enough, but" in message
    assert message.endswith("more nodes in placement.nodes, or bundles by hand")
    assert "more nodes in placement.nodes" in str(refused.value)


@pytest.mark.parametrize("mode", [DECOUPLED, SPLIT])
def test_complaint_slime_2373_a_group_that_starts_in_the_middle_of_a_node(mode):
    """4 devices of another role and 12 of rollout on nodes of 8: where an engine is does not follow
    from its number alone.
    """
    asked = request(mode, nodes(8, 8), role("teacher", group(1, 4)), role("rollout", group(3, 4)))
    made = plan(asked)
    assert violations(asked, made) == []
    heads = {one.engine_id: str(made.bundles(one)[0]) for one in made.replicas}
    assert heads == {
        "teacher-model/0": "n0:0",
        "rollout-model/0": "n0:4",
        "rollout-model/1": "n1:0",
        "rollout-model/2": "n1:4",
    }
    rollout = made.roles[1].models[0].engine_groups[0].placement
    assert rollout.gpu_ids == (4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("mode", [DECOUPLED, SPLIT, DEFER])
def test_complaint_verl_4903_bundles_are_in_the_order_of_nodes_and_devices(mode):
    """Rank by rank they go up in a node and from node to node, whatever the order of dealing."""
    asked = request(
        mode,
        nodes(4, 2, 4, 4),
        role("genrm", group(1, 2)),
        role("rollout", group(1, 8, nodes_per_replica=2)),
        trainer_devices=3,
    )
    made = plan(asked)
    assert violations(asked, made) == []
    names = [node.name for node in made.cluster.nodes]
    for one in made.replicas:
        places = [(names.index(bundle.node), bundle.device) for bundle in made.bundles(one)]
        assert places == sorted(places)
        assert list(one.bundle_indices) == sorted(one.bundle_indices)


def test_complaint_verl_4903_it_is_so_where_a_later_group_was_dealt_first():
    roles = role("rollout", group(1, 2), group(1, 4)), role("genrm", group(2, 1))
    asked = request(DECOUPLED, nodes(4, 2, 2), *roles)
    made = plan(asked)
    assert violations(asked, made) == []
    small, large = made.roles[0].models[0].engine_groups
    assert (small.placement.bundle_indices, large.placement.bundle_indices) == (
        (4, 5),
        (0, 1, 2, 3),
    )


def test_the_trainer_is_on_one_node_where_it_can_be():
    def trainer(count: int):
        made = plan(request(SPLIT, nodes(4, 4), role("rollout", group(2)), trainer_devices=count))
        return [str(made.groups[0].bundles[index]) for index in made.trainer_bundles]

    assert trainer(2) == ["n0:2", "n0:3"]
    assert trainer(3) == ["n1:0", "n1:1", "n1:2"]
    assert trainer(5) == ["n0:2", "n0:3", "n1:0", "n1:1", "n1:2"]
