"""Wrong calls are refused by name, before anything is sent: the ranks serve on afterwards."""

from __future__ import annotations

import pytest
import torch

from phalanx import parallel as P
from phalanx.errors import PhalanxDistError, PhalanxError, UnknownGroupError
from phalanx.schema.parallel import ParallelConfig
from tests.parallel.rank_pool import mesh_of

X = torch.zeros(3, 4)
REFUSALS = [
    (lambda: P.all_reduce(X, group="tp"), "'tp' is not a group; the groups are world, pipeline"),
    (lambda: P.all_reduce(X.bool(), "dense_tp"), "all_reduce cannot reduce booleans; convert"),
    (lambda: P.all_reduce(X, "dense_tp", "sum of"), "op='sum of' is not a ReduceOp; .*SUM"),
    (lambda: P.all_reduce(X.to("meta"), "dense_tp"), "on meta, but .* communicate on cpu; move"),
    (lambda: P.all_gather(X, "dense_tp", 2), r"dim=2 does not exist in .* shape \(3, 4\)"),
    (lambda: P.all_gather(X, "dense_tp", sizes=[4]), r"sizes=\(4,\) must hold one .* 2 ranks"),
    (lambda: P.all_gather(X, "dense_tp", sizes=[3, 3]), r"sizes=\(3, 3\) say 3 .* has 4 along"),
    (lambda: P.reduce_scatter(X, "dense_tp"), r"divide dimension 0 of \(3, 4\) among the 2 ranks"),
    (lambda: P.reduce_scatter(X, "dense_tp", -3), "reduce_scatter: dim=-3 does not exist"),
    (lambda: P.reduce_scatter(X.bool(), "dense_tp", 1), "reduce_scatter cannot reduce booleans"),
    (lambda: P.all_to_all(X, "dense_tp"), "cannot divide 3 rows among the 2 ranks of dense_tp"),
    (lambda: P.all_to_all(X, "dense_tp", [1, 2]), "both in_splits and out_splits, or neither"),
    (lambda: P.all_to_all(X, "dense_tp", out_splits=[1, 2]), "both in_splits and out_splits"),
    (lambda: P.all_to_all(X, "dense_tp", [3], [3]), r"in_splits=\(3,\) must hold one number"),
    (lambda: P.all_to_all(X, "dense_tp", [1, 1], [1, 1]), "add up to 2, but .* has 3 rows"),
    (lambda: P.all_to_all(X, "dense_tp", [4, -1], [4, -1]), "0 or more"),
    (lambda: P.all_to_all(torch.tensor(1.0), "dense_tp"), r"dim=0 does not exist in .* \(\)"),
    (lambda: P.broadcast(X, "dense_tp", src=2), r"src=2 is not a position in dense_tp, .* 0 to 1"),
    (lambda: P.send(X, "dense_tp", dst=-1), "dst=-1 is not a position"),
    (lambda: P.recv((1,), torch.int64, "dense_tp", src=True), "src=True is not a position"),
    (lambda: P.barrier("all"), "'all' is not a group; the groups are world, pipeline"),
    (lambda: P.warmup_collectives(["tp"]), "'tp' is not a group"),
]


def _refusals() -> None:
    mesh = mesh_of(ParallelConfig())
    for call, message in REFUSALS:
        with pytest.raises(PhalanxDistError, match=message):
            call()
    with pytest.raises(PhalanxDistError, match=r"is this rank itself in dense_tp"):
        P.send(X, "dense_tp", dst=mesh.rank)
    with pytest.raises(PhalanxDistError, match=r"is this rank itself in dense_tp"):
        P.recv((1,), torch.int64, "dense_tp", src=mesh.rank)
    with pytest.raises(PhalanxDistError, match="differ at position"):
        P.all_to_all(X, "dense_tp", [1, 2], [2, 1])
    assert P.all_reduce(torch.ones(1), group="dense_tp").tolist() == [2.0]


def test_wrong_calls_are_refused_before_anything_is_sent(two_ranks):
    two_ranks.run(_refusals)


def test_an_unknown_group_is_refused_in_a_mesh_of_one_rank_too():
    with P.use_mesh(P.create_mesh(ParallelConfig(), replica_world_size=1)):
        with pytest.raises(UnknownGroupError, match="'tp' is not a group; the groups are world"):
            P.all_reduce(X, group="tp")
        with pytest.raises(PhalanxDistError, match=r"src=1 is not a position in world"):
            P.broadcast(X, group="world", src=1)
        with pytest.raises(PhalanxDistError, match="in_splits"):
            P.all_to_all(X, group="world", in_splits=[3])
        with pytest.raises(PhalanxDistError, match="sizes"):
            P.all_gather(X, group="world", sizes=[3])


def test_errors_are_of_the_projects_tree():
    assert issubclass(PhalanxDistError, PhalanxError)
    assert issubclass(PhalanxDistError, RuntimeError)
    assert issubclass(UnknownGroupError, KeyError)
