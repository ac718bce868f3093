"""Rank order and groups, against examples worked out by hand and against the formula."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigurationError, UnknownGroupError
from phalanx.parallel.layout import GROUP_NAMES, RankLayout, build_layout, memberships
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)


def layout_of(
    *,
    outer: dict | None = None,
    dense: dict | None = None,
    attention: dict | None = None,
    moe: dict | None = None,
) -> RankLayout:
    parallel = ParallelConfig(
        OuterParallelConfig(**outer or {}),
        DenseParallelConfig(**dense or {}),
        AttentionParallelConfig(**attention or {}),
        MoeParallelConfig(**moe or {}),
    )
    return build_layout(parallel.resolve(parallel.infer_replica_world_size()))


def singletons(world: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(world))


def blocks(world: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(start, start + size)) for start in range(0, world, size))


GUIDE = {
    "outer": {"cfg_size": 2},
    "dense": {"tp_size": 4},
    "attention": {"tp_size": 4},
    "moe": {"tp_size": 2, "ep_size": 2},
}


def test_e1_the_guides_example():
    layout = layout_of(**GUIDE)
    assert layout.world == 8
    assert dict(layout.groups) == {
        "world": blocks(8, 8),
        "pipeline": singletons(8),
        "cfg": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "dense_tp": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "dense_dp": singletons(8),
        "attention_tp": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "attention_cp": singletons(8),
        "attention_dp": singletons(8),
        "attention_decode_cp": singletons(8),
        "moe_tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "moe_ep": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "moe_dp": singletons(8),
        "moe_tp_ep": ((0, 1, 2, 3), (4, 5, 6, 7)),
    }


def test_e1_where_rank_6_belongs():
    layout = layout_of(**GUIDE)
    places = dict(memberships(layout, 6))
    assert list(places) == list(GROUP_NAMES)
    assert places["world"] == 6
    assert (places["cfg"], layout.members_for("cfg", 6)) == (1, (2, 6))
    assert places["dense_tp"] == 2
    assert (places["moe_tp"], layout.members_for("moe_tp", 6)) == (0, (6, 7))
    assert (places["moe_ep"], layout.members_for("moe_ep", 6)) == (1, (4, 6))
    assert layout.group_rank("moe_ep", 6) == 1


def test_e2_guidance_over_tensor_parallel():
    layout = layout_of(outer={"cfg_size": 2}, dense={"tp_size": 2})
    assert layout.world == 4
    assert layout.groups_for("cfg") == ((0, 2), (1, 3))
    assert layout.groups_for("dense_tp") == ((0, 1), (2, 3))


def test_e3_domains_that_cut_the_same_ranks_differently():
    layout = layout_of(
        dense={"tp_size": 4}, attention={"tp_size": 2, "cp_size": 2}, moe={"ep_size": 4}
    )
    assert layout.world == 4
    assert layout.groups_for("dense_tp") == ((0, 1, 2, 3),)
    assert layout.groups_for("attention_tp") == ((0, 1), (2, 3))
    assert layout.groups_for("attention_cp") == ((0, 2), (1, 3))
    assert layout.groups_for("moe_ep") == ((0, 1, 2, 3),)
    assert layout.groups_for("moe_tp") == singletons(4)


def test_e4_data_parallel_domains():
    layout = layout_of(
        dense={"tp_size": 2, "dp_size": 2},
        attention={"cp_size": 2, "dp_size": 2},
        moe={"tp_size": 2, "dp_size": 2},
    )
    assert layout.world == 4
    assert layout.groups_for("dense_tp") == ((0, 1), (2, 3))
    assert layout.groups_for("dense_dp") == ((0, 2), (1, 3))
    assert layout.groups_for("attention_tp") == singletons(4)
    assert layout.groups_for("attention_cp") == ((0, 1), (2, 3))
    assert layout.groups_for("attention_dp") == ((0, 2), (1, 3))
    assert layout.groups_for("moe_tp") == ((0, 1), (2, 3))
    assert layout.groups_for("moe_dp") == ((0, 2), (1, 3))


def test_e5_derived_sizes_over_8_ranks():
    layout = layout_of(dense={"tp_size": 8}, attention={"dp_size": 2}, moe={"ep_size": 4})
    assert layout.world == 8
    assert layout.groups_for("attention_tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups_for("attention_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups_for("moe_tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups_for("moe_ep") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.groups_for("moe_tp_ep") == ((0, 1, 2, 3, 4, 5, 6, 7),)


def test_e6_a_pipeline_over_guidance_over_tensor_parallel():
    layout = layout_of(outer={"pipeline_size": 2, "cfg_size": 2}, dense={"tp_size": 2})
    assert layout.world == 8
    assert layout.groups_for("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups_for("cfg") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups_for("dense_tp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_e7_rank_13_of_16():
    layout = layout_of(attention={"tp_size": 4, "cp_size": 2, "dp_size": 2, "decode_cp_size": 2})
    assert layout.world == 16
    assert layout.members_for("attention_tp", 13) == (12, 13, 14, 15)
    assert layout.members_for("attention_cp", 13) == (9, 13)
    assert layout.members_for("attention_dp", 13) == (5, 13)
    assert layout.members_for("attention_decode_cp", 13) == (12, 13)


def test_13_families_in_a_fixed_order():
    assert len(GROUP_NAMES) == len(set(GROUP_NAMES)) == 13
    assert tuple(layout_of().groups) == GROUP_NAMES


small = st.integers(1, 3)
topologies = st.builds(
    ParallelConfig,
    st.builds(OuterParallelConfig, pipeline_size=small, cfg_size=small),
    st.builds(DenseParallelConfig, dp_size=small),
    st.builds(AttentionParallelConfig, cp_size=small, dp_size=small, decode_cp_size=small),
    st.builds(MoeParallelConfig, ep_size=small, dp_size=small),
)


@given(parallel=topologies, factor=small)
@settings(max_examples=40, deadline=None)
def test_every_family_partitions_the_ranks(parallel, factor):
    world = parallel.infer_replica_world_size() * factor
    if world > 200:
        return
    layout = build_layout(parallel.resolve(world))
    assert tuple(layout.groups) == GROUP_NAMES
    for name, family in layout.groups.items():
        assert sorted(rank for members in family for rank in members) == list(range(world))
        assert all(list(members) == sorted(members) for members in family)
        assert [members[0] for members in family] == sorted(members[0] for members in family)
        assert len({len(members) for members in family}) == 1, f"{name} is uneven"


@given(parallel=topologies)
@settings(max_examples=40, deadline=None)
def test_the_rank_formula_holds(parallel):
    resolved = parallel.resolve(parallel.infer_replica_world_size())
    layout, outer = build_layout(resolved), resolved.outer
    step = max(1, resolved.world_size // 60)
    for rank in range(0, resolved.world_size, step):
        place = dict(memberships(layout, rank))
        local = rank - resolved.scope_size * (place["pipeline"] * outer.cfg_size + place["cfg"])
        assert local == place["dense_tp"] + resolved.tp_size("dense") * place["dense_dp"]
        attention = resolved.attention
        assert local == place["attention_tp"] + resolved.tp_size("attention") * (
            place["attention_cp"] + attention.cp_size * place["attention_dp"]
        )
        assert local == place["moe_tp"] + resolved.tp_size("moe") * (
            place["moe_ep"] + resolved.moe.ep_size * place["moe_dp"]
        )
        assert place["attention_decode_cp"] == place["attention_tp"] % attention.decode_cp_size
        assert place["moe_tp_ep"] == place["moe_tp"] + resolved.tp_size("moe") * place["moe_ep"]


@given(parallel=topologies)
@settings(max_examples=20, deadline=None)
def test_decode_groups_lie_inside_tensor_parallel_groups(parallel):
    layout = build_layout(parallel.resolve(parallel.infer_replica_world_size()))
    for members in layout.groups_for("attention_decode_cp"):
        assert len(members) == parallel.attention.decode_cp_size
        assert set(members) <= set(layout.members_for("attention_tp", members[0]))


def test_s15_a_layout_pickles_and_cannot_be_changed():
    layout = layout_of(**GUIDE)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert hash(copy) == hash(layout)
    for one in (layout, copy):
        with pytest.raises(TypeError):
            one.groups["world"] = ()
        with pytest.raises(AttributeError):
            one.world = 3


def test_s15_a_layout_does_not_follow_the_mapping_it_was_made_from():
    groups = {"world": [[0, 1]]}
    layout = RankLayout(2, groups)
    groups["world"].append([2])
    assert layout.groups_for("world") == ((0, 1),)


def test_an_unknown_group_is_a_key_error_that_lists_the_known():
    layout = layout_of()
    with pytest.raises(KeyError) as caught:
        layout.members_for("tp", 0)
    assert isinstance(caught.value, UnknownGroupError)
    assert str(caught.value) == f"'tp' is not a group; the groups are {', '.join(GROUP_NAMES)}"
    for ask in (layout.groups_for, lambda name: layout.group_rank(name, 0)):
        with pytest.raises(UnknownGroupError, match="'tp' is not a group"):
            ask("tp")


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_is_a_value_error(rank):
    layout = layout_of(**GUIDE)
    for ask in (layout.members_for, layout.group_rank):
        with pytest.raises(ValueError, match=rf"rank {rank} is not .* its ranks are 0 to 7"):
            ask("world", rank)


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        (((0, 1),), "each of the ranks 0 to 2 exactly once"),
        (((0, 1), (1, 2)), "each of the ranks 0 to 2 exactly once"),
        (((0, 1), (2, 3)), "each of the ranks 0 to 2 exactly once"),
        (((1, 0), (2,)), "ascending order"),
        (((0, 0), (1, 2)), "without repetition"),
    ],
)
def test_groups_that_are_no_partition_are_refused(family, problem):
    with pytest.raises(ConfigurationError, match=f"groups of dense_tp must .*{problem}"):
        RankLayout(3, {"dense_tp": family})


def test_a_family_of_another_name_is_refused():
    with pytest.raises(ConfigurationError, match="'tp' is not a family of groups; allowed: world"):
        RankLayout(1, {"tp": ((0,),)})


def test_layouts_load_no_torch():
    program = "import sys, phalanx.parallel.layout; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
