"""From arguments to a service: weights, ranks, resources and the loop."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.device import create_backend
from phalanx.device.base import DeviceBackend
from phalanx.device.memory_account import create_account
from phalanx.device.operators import create_operators
from phalanx.device.operators.base import Operators
from phalanx.device.stage_times import StageTimes
from phalanx.engine_config import get_engine_config
from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.layers.unipc import SchedulerConfig
from phalanx.loop.model_memory import ModelMemory
from phalanx.loop.resident_memory import ResidentMemory
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.models.cosmos3 import denoise_node, text_node
from phalanx.models.cosmos3.args import Cosmos3Args
from phalanx.models.cosmos3.codec_nodes import DecodeNode, EncodeNode, VideoDecoder
from phalanx.models.cosmos3.denoise_node import DenoiseNode
from phalanx.models.cosmos3.guidance import BranchRanks
from phalanx.models.cosmos3.loading import load_transformer
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.row import DECODE_NODE, DENOISE_NODE, ENCODE_NODE, KV, TEXT_NODE
from phalanx.models.cosmos3.row_maker import RowMaker
from phalanx.models.cosmos3.service import Answer, Cosmos3Service, ServiceParts
from phalanx.models.cosmos3.text_node import TextNode
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.models.cosmos3.vae.checkpoint import load_vae
from phalanx.models.cosmos3.vae.codec import WanVae
from phalanx.models.cosmos3.vae.tiling import TiledDecoder, Tiling
from phalanx.models.cosmos3.validation import limits_of
from phalanx.models.cosmos3.weight_store import Cosmos3Weights
from phalanx.parallel.current import current_mesh
from phalanx.parallel.ranks import Fact, Ranks
from phalanx.processing.text.files import read_json
from phalanx.schema.control import MemoryTag
from phalanx.step.engine import StepEngine
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.base import ResourceSpec
from phalanx.step.resources.joint_attention import JointAttentionSpec
from phalanx.step.resources.kv_cache import KVCache, KVConfig, KVSpec
from phalanx.step.resources.ragged_attention import RaggedAttentionSpec
from phalanx.step.submodule import NodeSubmodule

logger = logging.getLogger(__name__)

PAGE_SIZE = 16
_SCHEDULER = Path("scheduler") / "scheduler_config.json"
_PIPELINE = Path("model_index.json")


@dataclass(frozen=True)
class LoadedCosmos3:
    """What is in memory of a checkpoint, and the ranks that compute it together."""

    transformer: Cosmos3Transformer
    vae: WanVae
    decoder: VideoDecoder | None
    """None where another rank decodes and answers."""
    scheduler: SchedulerConfig
    branches: BranchRanks
    lockstep: Lockstep
    everyone: Ranks
    """All ranks of the replica."""
    weights: Cosmos3Weights
    memory: ResidentMemory
    """It has been told of the weights."""
    backend: DeviceBackend
    operators: Operators


def load_model(args: Cosmos3Args) -> LoadedCosmos3:
    """Read the checkpoint, or this rank's part of it, into the fastest form that this device has.

    Raises `CheckpointError` for one that does not fit, `ConfigurationError` for ranks that the
    model does not divide by, or that were given different arguments.
    """
    engine_config = get_engine_config()
    runtime, dtype = engine_config.runtime, engine_config.device.torch_dtype
    times = StageTimes() if runtime.step_timings else None
    capture = None if runtime.use_cuda_graph else "off"
    backend = create_backend(engine_config.device.target, times, capture=capture)
    directory = Path(args.checkpoint_dir)
    ranks, branches = Ranks.current(backend.device), BranchRanks.current()
    mesh = current_mesh()
    world = None if mesh is None or mesh.world_size == 1 else mesh.group("world")
    everyone = Ranks.alone(backend.device) if world is None else Ranks(world, world)
    if world is not None:
        everyone.check_same(_facts(args, directory))
    operators = create_operators(args.native_operators, backend.device.type, dtype)
    transformer = load_transformer(
        directory, operators, backend.device, dtype, ranks, strict=args.weight_strict
    )
    if world is not None:
        everyone.check_same({"the checksum of its weights": transformer.checksum()})
    vae, scheduler = load_vae(directory, backend.device, dtype), read_scheduler(directory)
    _check_latents(transformer, vae, directory)
    weights = Cosmos3Weights(transformer, vae, directory, backend.device, strict=args.weight_strict)
    memory = ResidentMemory(create_account(backend.device))
    memory.hold(MemoryTag.WEIGHTS, weights.num_bytes)
    decoder: VideoDecoder | None = None
    if args.vae_tiling:
        decoder = TiledDecoder(vae, Tiling(), world)
    elif mesh is None or mesh.answers:
        decoder = vae
    logger.info(
        "loaded Cosmos3 in %s, tensor-parallel rank %d of %d, branches of guidance %s: %d layers, "
        "operators %s",
        str(dtype).removeprefix("torch."),
        ranks.rank,
        ranks.size,
        ", ".join(branches.labels),
        transformer.config.num_hidden_layers,
        operators.name,
    )
    return LoadedCosmos3(
        transformer=transformer,
        vae=vae,
        decoder=decoder,
        scheduler=scheduler,
        branches=branches,
        lockstep=Lockstep(world),
        everyone=everyone,
        weights=weights,
        memory=memory,
        backend=backend,
        operators=operators,
    )


def build_service(
    model: LoadedCosmos3, args: Cosmos3Args, answer: Answer, *, decode_video: bool = False
) -> Cosmos3Service:
    """A service of `args.max_batch_size` requests at once."""
    nodes = nodes_of(model, args.max_batch_size)
    text = nodes[TEXT_NODE]
    assert isinstance(text, TextNode)
    engine = StepEngine(model.backend)
    with model.memory.closed_on_failure():
        engine.load_model(nodes, list(specs_of(model, args)))
        cache = engine.resource(KV)
        assert isinstance(cache, KVCache)
        model.memory.hold(MemoryTag.KV_CACHE, cache.num_bytes)
        engine.warm_up()
    config = model.transformer.config
    rows = RowMaker(config, model.scheduler, model.backend.device, decode_video=decode_video)
    num_branches = model.branches.num_branches
    budget = Budget(num_branches * args.max_tokens, args.max_batch_size)
    loop = StepLoop(engine, budget)
    memory = ModelMemory(engine, loop, model.weights, model.everyone, model.memory)
    return Cosmos3Service(
        ServiceParts(engine, loop, memory, rows, text, model.lockstep, num_branches),
        answer,
        limits_of(config, args),
    )


def _check_latents(transformer: Cosmos3Transformer, vae: WanVae, directory: Path) -> None:
    """Refuse a transformer and an autoencoder that do not belong together."""
    channels = transformer.config.latent_channel
    if vae.config.z_dim != channels:
        raise CheckpointError(
            f"{directory}: transformer/config.json has latent_channel={channels} and vae/config.json "
            f"z_dim={vae.config.z_dim}; they must be equal: these are parts of different checkpoints"
        )


def read_scheduler(directory: Path) -> SchedulerConfig:
    """The noise levels of a checkpoint. Raises `CheckpointError`."""
    path = directory / _SCHEDULER
    stored = read_json(path, required=True)
    native = read_json(directory / _PIPELINE, required=False).get("use_native_flow_schedule", False)
    try:
        return SchedulerConfig.from_json(stored, native=native is True)
    except ConfigurationError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def nodes_of(model: LoadedCosmos3, max_batch_size: int) -> dict[str, NodeSubmodule]:
    """The nodes by name."""
    parts = (model.transformer, model.backend, model.branches, model.lockstep)
    return {
        ENCODE_NODE: EncodeNode(model.vae, model.lockstep),
        TEXT_NODE: TextNode(*parts),
        DENOISE_NODE: DenoiseNode(*parts, max_batch_size),
        DECODE_NODE: DecodeNode(model.decoder, model.lockstep),
    }


def specs_of(model: LoadedCosmos3, args: Cosmos3Args) -> Iterator[ResourceSpec]:
    """The cache of texts, attention of texts and attention of media to them."""
    transformer, text, media = model.transformer, frozenset({TEXT_NODE}), frozenset({DENOISE_NODE})
    config = transformer.config
    cache = KVConfig(
        num_layers=config.num_hidden_layers,
        num_kv_heads=transformer.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=_num_pages(args, model.branches),
        page_size=PAGE_SIZE,
        max_seq_len=args.max_text_tokens,
        dtype=transformer.dtype,
        # Keys that media read are not those that text itself would go on from.
        prefix_cache=not config.separate_text_keys,
    )
    yield KVSpec(KV, text | media, cache)
    yield AttentionSpec(text_node.ATTENTION, text, KV, model.operators)
    if config.separate_text_keys:
        yield RaggedAttentionSpec(text_node.WITHIN, text, causal=True)
    yield JointAttentionSpec(denoise_node.ATTENTION, media, KV)


def _num_pages(args: Cosmos3Args, branches: BranchRanks) -> int:
    """Pages for this rank's branches of `pool_tokens`."""
    per_text = -(-args.max_text_tokens // PAGE_SIZE)
    if branches.group is None:
        return max(-(-args.num_pool_tokens // PAGE_SIZE), branches.num_branches * per_text)
    args.check_branches(branches.group.size)
    extra = args.num_pool_tokens // branches.group.size - args.max_batch_size * args.max_text_tokens
    return args.max_batch_size * per_text + -(-extra // PAGE_SIZE)


def _facts(args: Cosmos3Args, directory: Path) -> Mapping[str, Fact]:
    """What must be equal on all ranks of a replica: whatever decides what a step holds."""
    files = (
        Path("transformer") / "config.json",
        _SCHEDULER,
        _PIPELINE,
        Path("vae") / "config.json",
    )
    facts: dict[str, Fact] = {
        f"the checksum of {name}": zlib.crc32(path.read_bytes()) if path.is_file() else None
        for name, path in ((name, directory / name) for name in files)
    }
    own = ("checkpoint_dir", "native_operators")
    facts |= {name: value for name, value in asdict(args).items() if name not in own}
    return {"params_dtype": get_engine_config().device.params_dtype, **facts}
