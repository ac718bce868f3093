"""From a checkpoint directory to a service: the model is loaded once, then served within bounds."""

from __future__ import annotations

import logging
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from phalanx.device import create_backend
from phalanx.device.base import DeviceBackend
from phalanx.device.memory_account import create_account
from phalanx.device.operators import create_operators
from phalanx.device.operators.base import Operators
from phalanx.device.stage_times import StageTimes
from phalanx.engine_config import get_engine_config
from phalanx.errors import ConfigurationError
from phalanx.heap import give_back_freed_memory
from phalanx.loop.eviction import EVICTION_POLICIES
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.resident_memory import ResidentMemory
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decode_captures import DecodeCaptures
from phalanx.models.causal_lm.decoder import Decoder
from phalanx.models.causal_lm.grammar_queue import GrammarQueue
from phalanx.models.causal_lm.node import DecoderNode
from phalanx.models.causal_lm.operations import Operations
from phalanx.models.causal_lm.sequence import NODE, SequenceLimits
from phalanx.models.causal_lm.service import CausalLMService, ServiceParts
from phalanx.models.causal_lm.token_grammar import GrammarCompiler
from phalanx.models.causal_lm.weight_groups import WeightGroups
from phalanx.models.causal_lm.weight_store import DecoderWeights
from phalanx.parallel.ranks import Fact, Ranks
from phalanx.processing.text import TextTokenizer
from phalanx.schema.control import MemoryTag
from phalanx.schema.limits import Limits
from phalanx.step.engine import StepEngine
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.base import ResourceSpec
from phalanx.step.resources.kv_cache import KVCache, KVConfig, KVSpec, TransferSpec
from phalanx.step.resources.positions import PositionSpec
from phalanx.step.resources.sampler import SamplerSpec
from phalanx.step.transfer.sockets import create_transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """This rank's part of the weights in memory, and what was made for them.

    `memory` has been told of the weights.
    """

    config: DecoderConfig
    decoder: Decoder
    weights: DecoderWeights
    ranks: Ranks
    backend: DeviceBackend
    operators: Operators
    tokenizer: TextTokenizer | None
    memory: ResidentMemory


def load_service(args: CausalLMArgs) -> CausalLMService:
    """Load the checkpoint and build everything that serves it."""
    model = load_model(args)
    with model.memory.closed_on_failure():
        return build_service(model, args)


def load_model(args: CausalLMArgs) -> LoadedModel:
    """Read the checkpoint, or this rank's part of it, into the fastest form that this device has."""
    directory = Path(args.checkpoint_dir)
    config = DecoderConfig.from_directory(directory)
    engine_config = get_engine_config()
    device_config = engine_config.device
    runtime = engine_config.runtime
    times = StageTimes() if runtime.step_timings else None
    capture = None if runtime.use_cuda_graph else "off"
    backend = create_backend(device_config.target, times, capture=capture)
    ranks = Ranks.current(backend.device)
    if ranks.size > 1:
        ranks.check_same(_facts(args, directory))
    dtype = device_config.torch_dtype
    operators = create_operators(args.native_operators, backend.device.type, dtype)
    decoder = Decoder(config, operators, dtype, _context_length(args, config), ranks)
    decoder.rotary.to(backend.device)
    weights = DecoderWeights(decoder, operators, backend.device, directory, args.quantization)
    give_back_freed_memory()  # what they were read and packed from
    memory = ResidentMemory(create_account(backend.device))
    tokenizer = None
    if (directory / "tokenizer.json").is_file():
        tokenizer = TextTokenizer.from_directory(directory)
    logger.info(
        "loaded %s in %s, rank %d of %d: %d layers, packed weights %.0f MiB, operators %s",
        config.architecture,
        str(dtype).removeprefix("torch."),
        ranks.rank,
        ranks.size,
        config.num_layers,
        weights.packed_bytes / 2**20,
        operators.name,
    )
    memory.hold(MemoryTag.WEIGHTS, weights.num_bytes)
    return LoadedModel(config, decoder, weights, ranks, backend, operators, tokenizer, memory)


def build_service(
    model: LoadedModel, args: CausalLMArgs, node: DecoderNode | None = None
) -> CausalLMService:
    """A service of `model` with the cache and the step bounds of `args`; `node` if not our own."""
    config = model.config
    if args.speculate and model.ranks.size > 1:
        raise ConfigurationError(
            f"speculate=True on {model.ranks.size} ranks; it works on one rank only: set it to False"
        )
    context_length = _context_length(args, config)
    num_pages = -(-args.pool_tokens // args.page_size)
    engine = StepEngine(model.backend)
    if node is None:
        captures = None
        if model.backend.captures and model.ranks.size == 1:
            captures = DecodeCaptures(
                args.max_batch_size, context_length, args.pool_tokens, model.backend.device
            )
        node = DecoderNode(model.decoder, model.backend, args.max_batch_size, captures)
    engine.load_model({NODE: node}, _specs(args, model, num_pages, context_length))
    cache = engine.resource("kv")
    assert isinstance(cache, KVCache)
    model.memory.hold(MemoryTag.KV_CACHE, cache.num_bytes)
    engine.warm_up()
    limits = Limits(
        context_length=context_length,
        pool_tokens=num_pages * args.page_size,
        vocab_size=config.vocab_size,
        max_batch_size=args.max_batch_size,
    )
    budget = Budget(args.max_step_tokens, args.max_batch_size)
    loop = PipelinedLoop if args.speculate else StepLoop
    compiler = GrammarCompiler(model.tokenizer, config.vocab_size, config.eos_ids)
    driven = loop(engine, budget, EVICTION_POLICIES[args.eviction]())
    groups = WeightGroups(model.backend.device)
    operations = Operations(engine, driven, model.weights, model.ranks, groups, model.memory)
    grammars = GrammarQueue(compiler, model.ranks.least)
    return CausalLMService(
        ServiceParts(engine, driven, node, operations, grammars),
        limits,
        SequenceLimits(config.eos_ids, context_length),
        model.tokenizer,
    )


def _facts(args: CausalLMArgs, directory: Path) -> dict[str, Fact]:
    """What must be equal on all ranks of a replica: whatever decides what a step holds."""
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    facts: dict[str, Fact] = {
        f"the checksum of {name}": zlib.crc32(path.read_bytes()) if path.is_file() else None
        for name, path in ((name, directory / name) for name in files)
    }
    own = ("checkpoint_dir", "native_operators", "transfer_host")
    facts |= {name: value for name, value in asdict(args).items() if name not in own}
    return {"params_dtype": get_engine_config().device.params_dtype, **facts}


def _context_length(args: CausalLMArgs, config: DecoderConfig) -> int:
    """Tokens of one request: the checkpoint's or the arguments', and no more than the pool."""
    wanted = args.context_length or config.max_positions
    if wanted > config.max_positions:
        raise ConfigurationError(
            f"context_length={wanted} exceeds the checkpoint's {config.max_positions} positions"
        )
    return min(wanted, args.pool_tokens)


def _transfer(args: CausalLMArgs) -> TransferSpec:
    """How requests are handed over; nothing listens before the first is."""
    return TransferSpec(
        partial(create_transfer, args.transfer, args.transfer_host, ttl_s=args.transfer_ttl_s)
    )


def _specs(
    args: CausalLMArgs, model: LoadedModel, num_pages: int, context_length: int
) -> list[ResourceSpec]:
    nodes = frozenset({NODE})
    config = model.config
    cache = KVConfig(
        num_layers=config.num_layers,
        num_kv_heads=model.decoder.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=num_pages,
        page_size=args.page_size,
        max_seq_len=context_length,
        dtype=get_engine_config().device.torch_dtype,
        prefix_cache=args.prefix_cache,
        host_pages=-(-args.host_pool_tokens // args.page_size),
    )
    return [
        KVSpec("kv", nodes, cache, _transfer(args) if model.ranks.size == 1 else None),
        AttentionSpec("attention", nodes, "kv", model.operators),
        PositionSpec("positions", nodes),
        SamplerSpec("sampler", nodes, config.vocab_size),
    ]
