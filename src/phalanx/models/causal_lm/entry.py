"""The `causal_lm` plugin: decoder-only language models, many requests a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from phalanx.device import create_backend
from phalanx.device.base import DeviceBackend
from phalanx.device.operators import create_operators
from phalanx.device.operators.base import Operators
from phalanx.engine_config import get_engine_config
from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.models.causal_lm.checkpoint import load_weights
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decoder import Decoder
from phalanx.models.causal_lm.node import DecoderNode
from phalanx.models.causal_lm.sequence import NODE, SequenceLimits
from phalanx.models.causal_lm.service import CausalLMService, check_lengths
from phalanx.plugin import BatchingEntry, ServingAdapter
from phalanx.processing.text import TextTokenizer, compile_stop_regex
from phalanx.schema.control import ControlOp
from phalanx.schema.events import Event
from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics
from phalanx.step.engine import StepEngine
from phalanx.step.resources.attention import AttentionSpec
from phalanx.step.resources.base import ResourceSpec
from phalanx.step.resources.kv_cache import KVConfig, KVSpec
from phalanx.step.resources.positions import PositionSpec
from phalanx.step.resources.sampler import SamplerSpec

logger = logging.getLogger(__name__)


class CausalLM(BatchingEntry):
    """Llama, Qwen2 and Qwen3 from a Hugging Face directory."""

    name = "causal_lm"
    args_cls = CausalLMArgs
    request_cls = GenerateRequest
    output_cls = GenerateOutput

    _service: CausalLMService

    @staticmethod
    def validate(request: GenerateRequest, limits: Limits) -> None:
        """Refuse token ids outside the vocabulary, requests that can never fit, bad expressions."""
        if request.input_ids is not None:
            _check_ids("input_ids", request.input_ids, limits)
            check_lengths(len(request.input_ids), request, limits)
        _check_ids("stop_token_ids", request.sampling.stop_token_ids, limits)
        _check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias], limits)
        if request.logprobs is not None:
            _check_logprobs(request, limits)
        compile_stop_regex(request.sampling.stop_regex)

    @classmethod
    def serving(cls, args: CausalLMArgs) -> ServingAdapter:
        from phalanx.models.causal_lm.serving import CausalLMServing

        return CausalLMServing(args)

    def setup(self, args: CausalLMArgs) -> None:
        self._service = load_service(args)

    @property
    def limits(self) -> Limits:
        return self._service.limits

    def start(self, rid: str, request: GenerateRequest) -> None:
        self._service.start(rid, request)

    def cancel(self, rid: str) -> None:
        self._service.cancel(rid)

    def tick(self) -> Sequence[Event]:
        return self._service.tick()

    @property
    def busy(self) -> bool:
        return self._service.busy

    def control(self, op: ControlOp) -> bool:
        return self._service.control(op)

    def statistics(self) -> LoopStatistics:
        return self._service.statistics()

    def close(self) -> None:
        self._service.close()


def load_service(args: CausalLMArgs) -> CausalLMService:
    """Load the checkpoint and build everything that serves it."""
    directory = Path(args.checkpoint_dir)
    config = DecoderConfig.from_directory(directory)
    device_config = get_engine_config().device
    backend = create_backend(device_config.target)
    context_length = _context_length(args, config)
    operators = create_operators(
        args.native_operators, backend.device.type, device_config.torch_dtype
    )
    decoder = _load_decoder(args, config, backend, operators, context_length)
    num_pages = -(-args.pool_tokens // args.page_size)
    engine = StepEngine(backend)
    engine.load_model(
        {NODE: DecoderNode(decoder, backend, args.max_batch_size)},
        _specs(args, config, operators, num_pages, context_length),
    )
    limits = Limits(
        context_length=context_length,
        pool_tokens=num_pages * args.page_size,
        vocab_size=config.vocab_size,
        max_batch_size=args.max_batch_size,
    )
    tokenizer = None
    if (directory / "tokenizer.json").is_file():
        tokenizer = TextTokenizer.from_directory(directory)
    return CausalLMService(
        engine,
        StepLoop(engine, Budget(args.max_step_tokens, args.max_batch_size)),
        limits,
        SequenceLimits(config.eos_ids, context_length),
        tokenizer,
    )


def _load_decoder(
    args: CausalLMArgs,
    config: DecoderConfig,
    backend: DeviceBackend,
    operators: Operators,
    context_length: int,
) -> Decoder:
    dtype = get_engine_config().device.torch_dtype
    decoder = Decoder(config, operators, dtype, context_length)
    load_weights(decoder, Path(args.checkpoint_dir), backend.device)
    decoder.to(backend.device)
    packed_bytes = decoder.pack(args.quantization)
    logger.info(
        "loaded %s in %s: %d layers, packed weights %.0f MiB, operators %s",
        config.architecture,
        str(dtype).removeprefix("torch."),
        config.num_layers,
        packed_bytes / 2**20,
        operators.name,
    )
    return decoder


def _context_length(args: CausalLMArgs, config: DecoderConfig) -> int:
    """Tokens of one request: the checkpoint's or the arguments', and no more than the pool."""
    wanted = args.context_length or config.max_positions
    if wanted > config.max_positions:
        raise ConfigurationError(
            f"context_length={wanted} exceeds the checkpoint's {config.max_positions} positions"
        )
    return min(wanted, args.pool_tokens)


def _specs(
    args: CausalLMArgs,
    config: DecoderConfig,
    operators: Operators,
    num_pages: int,
    context_length: int,
) -> list[ResourceSpec]:
    nodes = frozenset({NODE})
    cache = KVConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=num_pages,
        page_size=args.page_size,
        max_seq_len=context_length,
        dtype=get_engine_config().device.torch_dtype,
    )
    return [
        KVSpec("kv", nodes, cache),
        AttentionSpec("attention", nodes, "kv", operators),
        PositionSpec("positions", nodes),
        SamplerSpec("sampler", nodes, config.vocab_size),
    ]


def _check_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    if not ids:
        return
    vocab_size = limits.vocab_size
    assert vocab_size is not None
    for token in (min(ids), max(ids)):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{field} holds {token!r}; token ids are from 0 to {vocab_size - 1}", field=field
            )


def _check_logprobs(request: GenerateRequest, limits: Limits) -> None:
    options = request.logprobs
    assert options is not None
    _check_ids("token_ids_logprob", options.token_ids, limits)
    start, ids = options.prompt_start, request.input_ids
    if start is not None and ids is not None and start > len(ids):
        raise InvalidRequestError(
            f"logprob_start_len={start} is behind the prompt's {len(ids)} tokens",
            field="logprob_start_len",
        )
