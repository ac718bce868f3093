"""From arguments to a service: geometry, weights, resources and the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.device import create_backend
from phalanx.device.base import DeviceBackend
from phalanx.device.memory_account import create_account
from phalanx.device.operators import create_operators
from phalanx.device.operators.base import Operators
from phalanx.device.stage_times import StageTimes
from phalanx.engine_config import get_engine_config
from phalanx.heap import give_back_freed_memory
from phalanx.layers.shells import parameter_bytes
from phalanx.loop.model_memory import ModelMemory
from phalanx.loop.resident_memory import ResidentMemory
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.models.pi.args import PiArgs
from phalanx.models.pi.checkpoint import PiCheckpoint
from phalanx.models.pi.config import PiConfig
from phalanx.models.pi.expert import ActionExpert
from phalanx.models.pi.expert_node import ExpertNode
from phalanx.models.pi.geometry import PiGeometry, resolve_geometry
from phalanx.models.pi.loading import WeightSource
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.names import EMBEDDING
from phalanx.models.pi.prefix_nodes import PolicyNode, PrefixNode, VisionNode
from phalanx.models.pi.rollout import VALUE
from phalanx.models.pi.row import EXPERT_NODE, LATENTS, PREFIX_NODE, VISION_NODE
from phalanx.models.pi.row_maker import RowMaker
from phalanx.models.pi.service import PolicyService
from phalanx.models.pi.targets import Target
from phalanx.models.pi.weight_store import PolicyWeights
from phalanx.models.pi.weights import prefix_targets, unused_names
from phalanx.parallel.ranks import Ranks
from phalanx.schema.control import MemoryTag
from phalanx.schema.limits import Limits
from phalanx.step.engine import StepEngine
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.base import ResourceSpec
from phalanx.step.resources.kv_cache import KVCache, KVConfig, KVSpec
from phalanx.step.resources.slot_state import SlotStateSpec, StateBlock

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 1024

MakeExpert = Callable[[PiGeometry, torch.dtype, Operators], ActionExpert]


@dataclass(frozen=True)
class PolicyKind:
    """What sets one pi policy apart. `camera_count` reads it from `config.json`, None if it is not
    there.
    """

    published: PiGeometry
    make_expert: MakeExpert
    camera_count: Callable[[Mapping[str, Any]], int | None]


@dataclass(frozen=True)
class LoadedPolicy:
    """The weights in memory, and what was made for them. `memory` has been told of the weights."""

    model: PiModel
    backend: DeviceBackend
    operators: Operators
    weights: PolicyWeights
    memory: ResidentMemory


def load_policy(kind: PolicyKind, args: PiArgs) -> LoadedPolicy:
    """Read the checkpoint into the fastest form that this device has.

    Raises `CheckpointError` for one that does not fit.
    """
    engine_config = get_engine_config()
    runtime = engine_config.runtime
    times = StageTimes() if runtime.step_timings else None
    capture = None if runtime.use_cuda_graph else "off"
    backend = create_backend(engine_config.device.target, times, capture=capture)
    dtype = engine_config.device.torch_dtype
    operators = create_operators(args.native_operators, backend.device.type, dtype)
    checkpoint = None
    if args.checkpoint_dir is not None:
        checkpoint = PiCheckpoint(Path(args.checkpoint_dir), args.weight_remap)
    shapes = None if checkpoint is None else checkpoint.shapes()
    geometry = geometry_of(kind, args, {} if checkpoint is None else checkpoint.config(), shapes)
    with torch.device(backend.device):
        expert = kind.make_expert(geometry, dtype, operators)
        model = PiModel(geometry, expert, dtype, args.vision_dtype, operators)
    model.to(backend.device)
    tied = shapes is not None and EMBEDDING not in shapes
    targets, unused = targets_of(model, tied=tied), unused_names(model, tied=tied)
    source = WeightSource(checkpoint, args.weight_strict, runtime.seed or 0)
    weights = PolicyWeights(model, targets, unused, args.weight_remap, source)
    give_back_freed_memory()  # what they were read and packed from
    logger.info(
        "loaded a policy of %d layers in %s, operators %s",
        geometry.num_layers,
        str(dtype).removeprefix("torch."),
        operators.name,
    )
    memory = ResidentMemory(create_account(backend.device))
    memory.hold(MemoryTag.WEIGHTS, parameter_bytes(model))
    return LoadedPolicy(model, backend, operators, weights, memory)


def geometry_of(
    kind: PolicyKind,
    args: PiArgs,
    stored: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> PiGeometry:
    """The sizes of the policy that these arguments ask for."""
    given = args.config or PiConfig()
    cameras = args.num_cameras or given.num_cameras or kind.camera_count(stored)
    return resolve_geometry(kind.published, given, stored, shapes).with_cameras(cameras)


def targets_of(model: PiModel, *, tied: bool) -> dict[str, tuple[Target, ...]]:
    """Where each tensor of a checkpoint goes, by its plain name."""
    found: dict[str, tuple[Target, ...]] = {}
    for name, target in (*prefix_targets(model, tied=tied), *model.expert.targets()):
        found[name] = (*found.get(name, ()), target)
    return found


def build_service(
    policy: LoadedPolicy, max_batch_size: int, *, captures_rollouts: bool = False
) -> PolicyService:
    """A service of `max_batch_size` rows at once."""
    geometry = policy.model.geometry
    nodes = nodes_of(policy, max_batch_size, captures_rollouts=captures_rollouts)
    with policy.memory.closed_on_failure():
        engine = build_engine(policy, nodes, max_batch_size)
        cache = engine.resource("kv")
        assert isinstance(cache, KVCache)
        policy.memory.hold(MemoryTag.KV_CACHE, cache.num_bytes)
    budget = Budget(_step_tokens(policy, max_batch_size), max_batch_size)
    generator = torch.Generator()
    seed = get_engine_config().runtime.seed
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    loop, ranks = StepLoop(engine, budget), Ranks.alone(policy.backend.device)
    return PolicyService(
        engine,
        loop,
        ModelMemory(engine, loop, policy.weights, ranks, policy.memory),
        policy.weights,
        RowMaker(geometry, policy.backend.device, generator),
        geometry.image_tokens,
        limits_of(policy.model, max_batch_size),
    )


def _step_tokens(policy: LoadedPolicy, max_batch_size: int) -> int:
    """Tokens of one step: all that rows may have, or what keeps a CPU busy without spilling its caches."""
    most = max_batch_size * policy.model.max_tokens
    return min(most, _CPU_STEP_TOKENS) if policy.backend.device.type == "cpu" else most


def nodes_of(
    policy: LoadedPolicy, max_batch_size: int = 1, *, captures_rollouts: bool = False
) -> dict[str, PolicyNode]:
    """The nodes by name; those that are captured are for up to so many rows."""
    model, backend = policy.model, policy.backend
    expert = ExpertNode(model, backend, max_batch_size, captures_rollouts=captures_rollouts)
    return {
        VISION_NODE: VisionNode(model, backend),
        PREFIX_NODE: PrefixNode(model, backend),
        EXPERT_NODE: expert,
    }


def build_engine(
    policy: LoadedPolicy, nodes: Mapping[str, PolicyNode], max_batch_size: int
) -> StepEngine:
    """An engine of these nodes, with room for `max_batch_size` rows."""
    engine = StepEngine(policy.backend)
    engine.load_model(nodes, list(specs_of(policy, max_batch_size)))
    engine.warm_up()
    return engine


def limits_of(model: PiModel, max_batch_size: int) -> Limits:
    """What a request may be."""
    geometry, side = model.geometry, model.geometry.image_size
    return Limits(
        vocab_size=geometry.vocab_size,
        max_batch_size=max_batch_size,
        row_shapes={
            "pixel_values": (geometry.num_cameras, 3, side, side),
            "input_ids": (geometry.tokenizer_max_length,),
            "noise": (geometry.chunk_size, geometry.max_action_dim),
            "state": (geometry.max_state_dim,),
            **({VALUE: ()} if model.expert.trained_later else {}),
        },
    )


def specs_of(policy: LoadedPolicy, max_batch_size: int) -> Iterable[ResourceSpec]:
    """The cache, attention over it, and the noisy actions of so many rows."""
    model, geometry = policy.model, policy.model.geometry
    nodes = frozenset({PREFIX_NODE, EXPERT_NODE})
    # A page holds all that a row has, so that attention finds it in one piece.
    cache = KVConfig(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        num_pages=max_batch_size,
        page_size=model.max_tokens,
        max_seq_len=model.max_tokens,
        dtype=model.language.dtype,
        prefix_cache=False,
    )
    chunk = StateBlock((geometry.chunk_size, geometry.max_action_dim))
    yield KVSpec("kv", nodes, cache)
    yield AttentionSpec("attention", nodes, "kv", policy.operators)
    yield SlotStateSpec(LATENTS, frozenset({EXPERT_NODE}), {"x": chunk}, max_batch_size)
