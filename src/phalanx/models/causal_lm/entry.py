"""The `causal_lm` plugin: decoder-only language models, many requests a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.loading import load_service
from phalanx.models.causal_lm.service import CausalLMService
from phalanx.models.causal_lm.validation import check_request
from phalanx.parallel.sharding import shard_heads
from phalanx.plugin import ServiceEntry, ServingAdapter, WeightStore
from phalanx.schema.control import Question, WeightAnswer
from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.parallel import ParallelConfig


class CausalLM(ServiceEntry[CausalLMService]):
    """Llama, Qwen2 and Qwen3 from a Hugging Face directory, on one rank or tensor parallel."""

    name = "causal_lm"
    args_cls = CausalLMArgs
    request_cls = GenerateRequest
    output_cls = GenerateOutput
    parallel_domains = frozenset({"dense", "attention"})

    @staticmethod
    def validate(request: GenerateRequest, limits: Limits) -> None:
        """Refuse token ids outside the vocabulary, requests that can never fit, bad expressions."""
        check_request(request, limits)

    @classmethod
    def validate_parallel(
        cls, parallel: ParallelConfig, replica_world_size: int | None = None
    ) -> None:
        """Accepts tensor parallelism over all ranks of a replica, and nothing else."""
        super().validate_parallel(parallel, replica_world_size)
        for name in ("dense", "attention"):
            domain = parallel.domain(name)
            if not domain.is_tp_only:
                raise ConfigurationError(
                    f"plugin {cls.name!r} splits a model by tensor parallelism only, the same in "
                    f"all layers, but {name} is {domain}; set dense.tp_size and leave out the rest"
                )

    @classmethod
    def validate_args(cls, args: CausalLMArgs, parallel: ParallelConfig) -> None:
        """Refuses more ranks than the checkpoint, where it is on this machine, has heads for."""
        directory = Path(args.checkpoint_dir)
        resolved = parallel.resolve(parallel.infer_replica_world_size())
        size = resolved.tp_size("attention")
        if size > 1 and (directory / "config.json").is_file():
            config = DecoderConfig.from_directory(directory)
            shard_heads(config.num_heads, config.num_kv_heads, size, 0)

    @classmethod
    def serving(cls, args: CausalLMArgs) -> ServingAdapter:
        from phalanx.models.causal_lm.serving import CausalLMServing

        return CausalLMServing(args)

    def load(self, args: CausalLMArgs) -> CausalLMService:
        return load_service(args)

    def start(self, rid: str, request: GenerateRequest) -> None:
        self._service.start(rid, request)

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._service.wake_with(wake)

    def ask(self, question: Question) -> WeightAnswer:
        return self._service.ask(question)

    @property
    def weights(self) -> WeightStore:
        return self._service.weights
