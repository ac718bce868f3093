"""Small random Llamas, and servers of them, for the tests of what trainers ask."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import safetensors.torch
import torch

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.parallel import DenseParallelConfig, ParallelConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer
from tests.server.running import RunningServer, running

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
POOL_TOKENS = 16384


def write_llama(directory: Path, seed: int, **sizes: int) -> Path:
    """A Llama with random weights and a byte-level tokenizer; another seed gives other weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=400,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.6,
        **{**SIZES, **sizes},
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return write_byte_level_tokenizer(directory)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, by name."""
    return safetensors.torch.load_file(directory / "model.safetensors")


def serving(
    directory: Path,
    *,
    server: dict | None = None,
    deployment: DeploymentConfig | None = None,
    tp: int = 1,
    **options: object,
) -> AbstractContextManager[RunningServer]:
    args = CausalLMArgs(
        directory, native_operators="off", **{"pool_tokens": POOL_TOKENS, **options}
    )
    parallel = ParallelConfig(dense=DenseParallelConfig(tp_size=tp))
    config = EngineConfig(
        DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1), parallel=parallel
    )
    return running(
        lambda: Engine(EngineArgs("causal_lm", args, config), deployment=deployment),
        CausalLM.serving(args),
        ServerConfig(port=0, served_model_name="policy", **(server or {})),
    )
