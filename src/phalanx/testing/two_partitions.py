"""A toy of two partitions: a producer of tokens, which reads them back from its cache, and a
consumer that turns chunks of the tokens into a wave. `expected_speech` is the same without either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import PagedPlan
from phalanx.loop.walks import (
    EMIT_TO_CLIENT,
    NOWHERE,
    ChunkPolicy,
    Edge,
    Emitted,
    FinishedWalk,
    Loop,
    NextWalk,
    Node,
    Partition,
    Stream,
    Values,
    WalkGraph,
    WalkInputs,
    WalkModel,
    WalkNode,
    WalkProgram,
)
from phalanx.step.declaration import DEFAULT_LABEL, Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import Column, HostRow, NodeOutputs
from phalanx.step.resources.base import Resource, ResourceSpec
from phalanx.step.resources.kv_cache import KVCache, KVConfig, KVSpec, KVStep
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.submodule import EngineInputs, StepRow
from phalanx.testing.step_models import cached_digest, expected_tokens, store_tokens

PRODUCER = "talker"
CONSUMER = "vocoder"
MAX_COUNT = 4096
SAMPLES_PER_TOKEN = 4


@dataclass(frozen=True)
class SpeechRequest:
    """Produce up to `count` tokens after a prompt, and end with a token that is in `ends`."""

    prompt: tuple[int, ...]
    count: int
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Speech:
    """Tokens, and the samples of those among them that the consumer has had."""

    tokens: tuple[int, ...]
    wave: tuple[float, ...]


def samples(previous: int, token: int) -> list[float]:
    """The part of the wave that stands for a token, which begins where the one before ended."""
    return [
        math.sin(0.1 * previous + (0.1 * (token - previous)) * i / SAMPLES_PER_TOKEN)
        for i in range(SAMPLES_PER_TOKEN)
    ]


def expected_speech(request: SpeechRequest) -> Speech:
    """What a request gives when nothing goes wrong, however its tokens are cut into chunks."""
    tokens = expected_tokens(request.prompt, request.count)
    ended = [i for i, token in enumerate(tokens) if token in request.ends]
    tokens = tokens[: ended[0] + 1] if ended else tokens
    pairs = zip((0, *tokens), tokens, strict=False)
    wave = torch.tensor([sample for pair in pairs for sample in samples(*pair)])
    return Speech(tokens, tuple(wave.tolist()))


@dataclass(frozen=True)
class _Prepared:
    rows: tuple[StepRow, ...]
    token_ids: Tensor
    positions: Tensor
    plan: PagedPlan


class Talker(WalkNode):
    """Each token is a digest of what the cache holds of those before it."""

    read_on_host = frozenset({"token"})

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        cache = resources["kv"]
        assert isinstance(cache, KVCache)
        self._cache = cache

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[WalkInputs]
    ) -> SubmoduleStep:
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return SubmoduleStep(
            segments, {"kv": KVStep(segments), "positions": PositionStep(segments)}
        )

    def preprocess(self, engine: EngineInputs, inputs: Sequence[WalkInputs]) -> _Prepared:
        name = "prompt" if engine.walk == "prefill" else "token"
        token_ids = torch.cat(
            [
                given.one(name).reshape(-1)[given.start : given.start + row.span]
                for row, given in zip(engine.rows, inputs, strict=True)
            ]
        )
        plan = engine.plans["kv"].by_label[DEFAULT_LABEL]
        return _Prepared(engine.rows, token_ids, engine.plans["positions"], plan)

    def forward(self, prepared: _Prepared) -> NodeOutputs:
        store_tokens(self._cache, prepared.plan, prepared.token_ids, prepared.positions)
        rids = tuple(row.request_id for row in prepared.rows)
        tokens = [cached_digest(self._cache, prepared.plan, i) for i in range(len(rids))]
        return NodeOutputs({"token": Column(rids, torch.tensor(tokens, dtype=torch.int64))})

    def ended_loops(self, inputs: WalkInputs, outputs: HostRow) -> frozenset[str]:
        request = _speech(inputs.request)
        stops = bool(inputs.iterations) and outputs["token"] in request.ends
        return frozenset({"talk"} if stops else ())


class Vocoder(WalkNode):
    """Turns each new token of a chunk into samples. It keeps the last token of a chunk for the next
    one, where chunks do not overlap, by an output that persists.
    """

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return True

    def preprocess(
        self, engine: EngineInputs, inputs: Sequence[WalkInputs]
    ) -> list[tuple[str, WalkInputs]]:
        return [(row.request_id, given) for row, given in zip(engine.rows, inputs, strict=True)]

    def forward(self, prepared: list[tuple[str, WalkInputs]]) -> NodeOutputs:
        ragged: dict[str, dict[str, Tensor]] = {}
        for rid, given in prepared:
            chunk = given.chunks["token"]
            new = [int(token) for token in chunk.items[chunk.num_context :]]
            before = int(given.one("last"))
            ragged[rid] = {"last": torch.tensor(new[-1] if new else before)}
            if new:
                pairs = zip((before, *new), new, strict=False)
                wave = [sample for pair in pairs for sample in samples(*pair)]
                ragged[rid]["wave"] = torch.tensor(wave)
        return NodeOutputs(ragged=ragged)


class SpeechModel(WalkModel):
    """`prefill`, then `talk` in one partition; `speak` for each chunk in the other."""

    def first_walks(self, request: SpeechRequest) -> Mapping[str, NextWalk]:
        speak = NextWalk("speak", {"last": torch.tensor(0)})
        if request.count == 0:
            return {"vocoder": speak}
        prompt = torch.tensor(request.prompt, dtype=torch.int64)
        return {"talker": NextWalk("prefill", {"prompt": prompt}), "vocoder": speak}

    def next_walk(self, request: SpeechRequest, finished: FinishedWalk) -> NextWalk | None:
        if finished.walk == "speak":
            if finished.ended_streams:
                return None
            return NextWalk("speak", {"last": finished.tensors["last"]})
        (token,) = finished.tensors["token"]
        left = request.count - 1 if finished.walk == "prefill" else 0
        if left == 0 or int(token) in request.ends:
            return None
        return NextWalk("talk", {"token": token}, {"talk": left})

    def num_tokens(self, request: SpeechRequest, node: str, inputs: Mapping[str, Values]) -> int:
        return len(inputs["prompt"][0]) if "prompt" in inputs else 1

    def take_delta(self, request: SpeechRequest, emitted: Sequence[Emitted]) -> Speech:
        return _joined(emitted)

    def output(
        self, request: SpeechRequest, emitted: Sequence[Emitted], *, cancelled: bool
    ) -> Speech:
        return _joined(emitted)


def speech_partitions(policy: ChunkPolicy) -> tuple[Partition, ...]:
    """The walks of both partitions; the consumer's chunks follow `policy`."""
    outward = (
        Edge(EMIT_TO_CLIENT, "token", modality="text"),
        Edge(CONSUMER, "token", streaming=True),
        Edge(NOWHERE, "token", persist=True),
    )
    prefill = Node(PRODUCER, ("prompt",), outward, divisible=True)
    talk = Node(PRODUCER, ("token",), (Edge(PRODUCER, "token"), *outward))
    speak = Node(
        CONSUMER,
        ("token", "last"),
        (Edge(EMIT_TO_CLIENT, "wave", modality="audio"), Edge(NOWHERE, "last", persist=True)),
    )
    return (
        Partition(
            "talker",
            (
                WalkGraph("prefill", prefill, ("prompt",)),
                WalkGraph("talk", Loop("talk", talk, MAX_COUNT), ("token",)),
            ),
        ),
        Partition(
            "vocoder",
            (WalkGraph("speak", speak, ("last",)),),
            (Stream(CONSUMER, "token", policy),),
        ),
    )


def speech_engine(
    policy: ChunkPolicy,
    num_pages: int,
    page_size: int,
    *,
    talker: Talker | None = None,
    vocoder: Vocoder | None = None,
    probes: Sequence[ResourceSpec] = (),
) -> tuple[StepEngine, WalkProgram]:
    """An engine of both nodes on the CPU, and their walks."""
    nodes = frozenset({PRODUCER})
    config = KVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_pages=num_pages,
        page_size=page_size,
        max_seq_len=MAX_COUNT,
        dtype=torch.float64,
    )
    specs = [KVSpec("kv", nodes, config), PositionSpec("positions", nodes), *probes]
    submodules = {PRODUCER: talker or Talker(), CONSUMER: vocoder or Vocoder()}
    engine = StepEngine(CpuBackend())
    engine.load_model(submodules, specs)
    return engine, WalkProgram(speech_partitions(policy), submodules.keys(), specs)


def _speech(request: object) -> SpeechRequest:
    assert isinstance(request, SpeechRequest)
    return request


def _joined(emitted: Sequence[Emitted]) -> Speech:
    tokens = [int(one.tensor) for one in emitted if one.modality == "text"]
    waves = [sample for one in emitted if one.modality == "audio" for sample in one.tensor.tolist()]
    return Speech(tuple(tokens), tuple(waves))
