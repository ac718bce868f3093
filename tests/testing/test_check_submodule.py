"""The check of nodes passes those that keep requests apart, and names what another mixes up."""

from __future__ import annotations

import pytest
import torch

from phalanx.loop.outlook import Foreseeing, Outlook
from phalanx.loop.request import Work
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.submodule import NodeSubmodule
from phalanx.testing import ConformanceError, ModelParts, SubmoduleCase, check_submodule
from phalanx.testing.models.parts import Prepared
from phalanx.testing.models.recurrent import RECURRENT_PLACE, Recurrent, recurrent_parts
from phalanx.testing.models.stateless import STATELESS_NODE, Stateless, VectorRequest
from phalanx.testing.token_request import TokenRequest
from phalanx.testing.watched_node import WatchedNode, watched


class Vectors(VectorRequest, Foreseeing):
    """Starts again when it is pushed back, and knows what comes next."""

    def __init__(self, vector, rounds) -> None:
        super().__init__(vector, rounds)
        self.left = self.rounds = rounds

    def advance(self, span):
        super().advance(span)
        self.left -= span

    def work_after(self, span):
        ends = self.left <= span
        return Outlook.ENDS if ends else Work(STATELESS_NODE, "round", 1, 1)

    def push_back(self):
        self.__init__(self._first, self.rounds)


VECTORS = [
    lambda: Vectors([0.1] * 8, 4),
    lambda: Vectors(range(8), 5),
    lambda: Vectors([-0.5] * 8, 3),
]
TOKENS = [
    lambda: TokenRequest((3, 1, 4), 3, place=RECURRENT_PLACE),
    lambda: TokenRequest((2, 7), 4, place=RECURRENT_PLACE),
]
BROKEN = []


def broken(message: str):
    def note(cls):
        BROKEN.append(pytest.param(cls, message, id=cls.__name__))
        return cls

    return note


@broken("determinism: alone a second time, 'r0'")
class DrawsAtRandom(Stateless):
    def forward(self, prepared):
        vectors = super().forward(prepared).columns["vector"].values
        noisy = vectors + torch.randn_like(vectors)
        return NodeOutputs({"vector": Column(prepared.request_ids, noisy)})


@broken("batching: together, 'r0'")
class MixesRows(Stateless):
    def forward(self, prepared):
        vectors = super().forward(prepared).columns["vector"].values
        mixed = vectors - vectors.mean(0) * (len(vectors) > 1)
        return NodeOutputs({"vector": Column(prepared.request_ids, mixed)})


@broken("batching: (together|in reverse order)")
class CountsRows(Stateless):
    def forward(self, prepared):
        vectors = super().forward(prepared).columns["vector"].values
        places = torch.arange(len(vectors))[:, None]
        return NodeOutputs({"vector": Column(prepared.request_ids, vectors + places)})


@broken("row by row, 'r0'")
class ComputesOneRowOtherwise(Stateless):
    def forward_batched(self, prepared):
        vectors = super().forward(prepared).columns["vector"].values
        return NodeOutputs({"vector": Column(prepared.request_ids, vectors / 2)})


@broken("planned ahead")
class PreparesAheadOfWhatItNeeds(Stateless):
    speculates = True


class Remembers(Stateless):
    """What a row has been through is kept in the node, by request, and added to its vector."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, int] = {}

    def remember(self, rids) -> None:
        for rid in rids:
            self._seen[rid] = self._seen.get(rid, 0) + 1

    def forward(self, prepared):
        if not isinstance(prepared, Prepared):
            raise NotImplementedError("it cannot be captured")
        vectors = super().forward(prepared).columns["vector"].values
        seen = torch.tensor([self._seen.get(rid, 0) for rid in prepared.request_ids])
        return NodeOutputs({"vector": Column(prepared.request_ids, vectors + seen[:, None])})

    def capture_configs(self):
        return ()

    def check_stop(self, row, outputs):
        self.remember([row.request_id])
        return super().check_stop(row, outputs)

    def cleanup_request(self, request_id):
        self._seen.pop(request_id, None)


@broken("cleanup: a request with the id of an ended one")
class KeepsWhatHasEnded(Remembers):
    def cleanup_request(self, request_id):
        pass


@broken("(batching|cancel|cleanup)")
class ForgetsEverybody(Remembers):
    def cleanup_request(self, request_id):
        self._seen.clear()


@broken("fault in (declare_step|preprocess|forward): 'r1' failed, and its neighbour")
class CountsWhatIsDeclared(Remembers):
    def declare_step(self, walk, rows, inputs):
        self.remember([row.request_id for row in rows])

    def check_stop(self, row, outputs):
        return Stateless.check_stop(self, row, outputs)


@broken("captured: node 'stateless' as .*")
class LooksAtItsInputs(Stateless):
    def forward(self, prepared):
        tensors = prepared.tensors if isinstance(prepared, Prepared) else prepared
        assert float(tensors["vectors"].sum()) < 1000
        return super().forward(prepared)


@broken("captured, 'r0'")
class BakesANumber(Stateless):
    def preprocess(self, engine, inputs):
        self.scale = 2.0
        return super().preprocess(engine, inputs)

    def forward(self, prepared):
        column = super().forward(prepared).columns["vector"]
        scaled = column.values * getattr(self, "scale", 1.0)
        return NodeOutputs({"vector": Column(column.request_ids, scaled)})


@broken("outputs: 'vector' is given to .*stranger")
class AnswersAStranger(Stateless):
    def forward(self, prepared):
        column = super().forward(prepared).columns["vector"]
        return NodeOutputs({"vector": Column(("stranger",) * len(column.values), column.values)})


@broken("declare_step: a segment names .*stranger")
class DeclaresAStranger(Stateless):
    def declare_step(self, walk, rows, inputs):
        return SubmoduleStep((Segment("stranger", 1),), {})


@pytest.mark.parametrize(("cls", "message"), BROKEN)
def test_what_a_node_mixes_up_is_named(cls, message):
    case = SubmoduleCase(lambda: ModelParts({STATELESS_NODE: cls()}, ()), VECTORS, tolerance=1e-5)
    with pytest.raises(ConformanceError, match=message):
        check_submodule(case)


def recurrent_case(cls=Recurrent, requests=TOKENS) -> SubmoduleCase:
    def parts() -> ModelParts:
        return ModelParts({RECURRENT_PLACE[0]: cls()}, recurrent_parts(4).specs)

    return SubmoduleCase(parts, requests)


def test_state_that_is_left_is_found():
    class OpensAGhost(Recurrent):
        def prepare_inputs(self, walk, row):
            self._memory.ingest_request("ghost", None)
            return super().prepare_inputs(walk, row)

    with pytest.raises(ConformanceError, match="at rest: all requests have ended"):
        check_submodule(recurrent_case(OpensAGhost))


def test_a_request_that_does_not_go_back_is_found():
    class StaysWhereItIs(TokenRequest):
        def push_back(self):
            pass

    requests = [TOKENS[1], lambda: StaysWhereItIs((3, 1, 4), 3, place=RECURRENT_PLACE)]
    with pytest.raises(ConformanceError, match="push back: all were pushed back"):
        check_submodule(recurrent_case(requests=requests))


def test_what_a_failed_forward_leaves_in_a_resource_is_found():
    class WritesAtOnce(Recurrent):
        """Goes round the resource, which would put it back."""

        def __init__(self) -> None:
            super().__init__()
            self._sums: dict[str, float] = {}

        def forward(self, prepared):
            outputs = super().forward(prepared)
            if not isinstance(prepared, Prepared):
                return outputs
            for rid in prepared.request_ids:
                self._sums[rid] = self._sums.get(rid, 0) + 1
            giving = prepared.giving["token"]
            tokens = torch.tensor([int(self._sums[rid]) for rid in giving], dtype=torch.int64)
            return NodeOutputs({"token": Column(giving, tokens)} if giving else {})

        def cleanup_request(self, request_id):
            self._sums.pop(request_id, None)

        def capture_configs(self):
            return ()

    with pytest.raises(ConformanceError, match=r"(push back|chunks|fault in forward)"):
        check_submodule(recurrent_case(WritesAtOnce))


def test_one_request_is_not_enough():
    with pytest.raises(ConformanceError, match="at least two requests"):
        SubmoduleCase(lambda: recurrent_parts(4), TOKENS[:1])


def test_a_watched_node_passes_on_every_hook():
    hooks = {name for name, made in vars(NodeSubmodule).items() if callable(made)}
    hooks = {name for name in hooks if not name.startswith("__")}
    assert "declare_step" in hooks
    assert hooks <= vars(WatchedNode).keys()


def test_a_watched_node_has_the_attributes_of_the_one_inside():
    class Inside(Stateless):
        autocast_dtype = torch.bfloat16
        compiles = True
        read_on_host = frozenset({"vector"})
        speculates = True
        publishes = False

    flags = set(NodeSubmodule.__annotations__)
    outside = watched(Inside())
    assert {name: getattr(outside, name) for name in flags} == {
        name: getattr(Inside, name) for name in flags
    }
