"""How meshes are made, shared, chosen and given back."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx import parallel as P
from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from tests.parallel.rank_pool import mesh_of

TP2 = ParallelConfig(outer=OuterParallelConfig(cfg_size=2), dense=DenseParallelConfig(tp_size=2))


def single(name: str = "model") -> P.Mesh:
    return P.create_mesh(ParallelConfig(), replica_world_size=1, name=name)


def test_r20_a_mesh_follows_the_configuration_alone(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    mesh = P.create_mesh(ParallelConfig())
    assert (mesh.rank, mesh.world_size) == (0, 1)


def test_a_single_rank_needs_no_process_group():
    mesh = single()
    assert P.default_group() is None
    assert mesh.group_members("dense_tp") == (0,)
    assert (mesh.group_size("world"), mesh.group_rank("world")) == (1, 0)
    assert mesh.group("world").collectives is None
    assert mesh.distinct_groups() == ()
    assert mesh.device == torch.device("cpu")


def test_several_ranks_need_a_process_group():
    with pytest.raises(PhalanxDistError, match="mesh of 4 ranks needs .* init_process_group first"):
        P.create_mesh(TP2)
    with pytest.raises(PhalanxDistError, match="mesh of 2 ranks needs"):
        P.create_mesh(ParallelConfig(), replica_world_size=2)


def test_a_topology_that_does_not_fit_is_refused_before_anything_else():
    with pytest.raises(ConfigurationError, match="does not divide the 3 ranks"):
        P.create_mesh(TP2, replica_world_size=3)


def test_a_device_without_collectives_is_refused():
    with pytest.raises(ConfigurationError, match="of type 'meta'; allowed: cpu, cuda"):
        P.create_mesh(ParallelConfig(), device="meta")


def test_a_backend_that_does_not_fit_the_device_is_refused():
    with pytest.raises(ConfigurationError, match="'nccl' does not fit .* 'cpu'; use 'gloo'"):
        P.create_mesh(ParallelConfig(), device="cpu", backend="nccl")
    assert P.create_mesh(ParallelConfig(), backend="gloo").device.type == "cpu"
    assert P.create_mesh(ParallelConfig(), backend="nccl").device.type == "cuda"


def test_init_makes_the_mesh_current_and_shutdown_closes_it():
    mesh = P.init(ParallelConfig())
    assert P.default_mesh() is mesh
    P.shutdown()
    P.shutdown()
    with pytest.raises(PhalanxDistError, match="no mesh is current here; .*use_mesh"):
        P.default_mesh()
    with pytest.raises(PhalanxDistError, match="the mesh 'model' is closed"):
        mesh.group("world")


def test_a_call_without_a_mesh_says_what_to_do():
    with pytest.raises(PhalanxDistError, match=r"no mesh is current here; .*init\(parallel\)"):
        P.all_reduce(torch.zeros(1), group="world")


def test_use_mesh_is_undone_at_its_end_and_after_an_error():
    outer, inner = single(), single()
    with P.use_mesh(outer) as used:
        assert used is outer
        with pytest.raises(KeyboardInterrupt), P.use_mesh(inner):
            assert P.default_mesh() is inner
            raise KeyboardInterrupt
        assert P.default_mesh() is outer


def test_meshes_are_found_by_name():
    model, draft = single(), single("draft")
    with P.use_mesh(model), P.use_mesh(draft):
        assert P.default_mesh() is draft
        with P.use_mesh("model"):
            assert P.default_mesh() is model
        P.barrier(mesh="model")
        P.barrier(mesh=draft)
        with pytest.raises(PhalanxDistError, match="no mesh is named 'vae' .*: model, draft"):
            P.barrier(mesh="vae")
    with pytest.raises(PhalanxDistError, match="no mesh is named 'model' here; known are: none"):
        P.barrier(mesh="model")


def test_threads_do_not_see_one_anothers_mesh():
    both_inside = threading.Barrier(2)
    seen: dict[str, tuple[P.Mesh, P.Mesh]] = {}

    def engine(name: str) -> None:
        mine = single(name)
        with P.use_mesh(mine):
            both_inside.wait()
            seen[name] = (mine, P.default_mesh())
            both_inside.wait()

    threads = [threading.Thread(target=engine, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine is current for mine, current in seen.values())
    assert seen["one"][0] is not seen["two"][0]


def _shared() -> None:
    mesh = mesh_of(TP2)
    groups = {name: mesh.group(name) for name in mesh.group_names}
    tensor_parallel = groups["dense_tp"].collectives
    assert tensor_parallel is not None
    assert groups["attention_tp"].collectives is tensor_parallel
    assert groups["moe_tp"].collectives is tensor_parallel
    assert groups["cfg"].collectives not in (None, tensor_parallel)
    assert groups["pipeline"].collectives is None
    assert len(mesh.distinct_groups()) == 3


def test_groups_of_the_same_ranks_share_one_process_group(four_ranks):
    four_ranks.run(_shared)


def _made() -> tuple[int, int]:
    import torch.distributed as dist

    def count() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = count()
    mesh = mesh_of(ParallelConfig())  # one group of all ranks, and singletons
    assert count() == before == 1
    mesh.close()
    mesh = P.create_mesh(TP2)
    made = count() - before
    mesh.close()
    mesh.close()
    return made, count()


def test_only_memberships_of_several_ranks_get_a_process_group(four_ranks):
    # Each rank is in one of the two pairs of cfg and one of the two of dense_tp.
    assert four_ranks.run(_made) == [(2, 1)] * 4


def _again() -> list[float]:
    results = []
    for _ in range(3):
        mesh_of(TP2)
        results += P.all_reduce(torch.ones(1), group="cfg").tolist()
        P.shutdown()
        facts = P.default_group()
        assert facts is not None
        assert (facts.size, facts.backend) == (4, "gloo")
    return results


def test_shutdown_leaves_the_process_group_up(four_ranks):
    assert four_ranks.run(_again) == [[2.0, 2.0, 2.0]] * 4


def _wrong_size() -> None:
    with pytest.raises(PhalanxDistError, match="mesh of 8 ranks cannot .* process group of 4"):
        P.create_mesh(ParallelConfig(), replica_world_size=8)
    # One rank alone is always possible: an engine inside a trainer's rank.
    alone = P.create_mesh(ParallelConfig(), replica_world_size=1)
    assert (alone.rank, alone.world_size) == (0, 1)


def test_r22_a_mesh_does_not_span_more_than_its_replica(four_ranks):
    four_ranks.run(_wrong_size)


def _twice() -> None:
    mesh_of(TP2)
    with pytest.raises(PhalanxDistError, match=r"mesh of 4 ranks is current .* shutdown\(\) first"):
        P.init(TP2)


def test_a_mesh_of_several_ranks_is_not_replaced_silently(four_ranks):
    four_ranks.run(_twice)


def _sized_by_group() -> None:
    mesh = mesh_of(ParallelConfig(attention=AttentionParallelConfig(cp_size=2)))
    assert mesh.world_size == 4
    assert mesh.group_size("attention_tp") == 2
    assert mesh.group_size("dense_tp") == 4
    assert mesh.group_rank("world") == P.default_group().rank


def test_the_process_group_gives_the_number_of_ranks(four_ranks):
    four_ranks.run(_sized_by_group)
