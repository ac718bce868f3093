"""Models that operations change: loaded for one test each, from checkpoints of the same geometry."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.engine_config import EngineConfig
from phalanx.schema.control import Continue, LoadWeights, Pause, PauseMode
from phalanx.schema.generate import GenerateOutput, GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import FLOAT32, Drive, load
from tests.models.references import fused

VOCABULARY = 96


def tiny_llama(**changes) -> transformers.LlamaForCausalLM:
    """Small enough to be loaded again and again; its tokens differ with its weights."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        **changes,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def save(directory: Path, seed: int, make=tiny_llama) -> Path:
    """A checkpoint of random weights, norms and biases too."""
    torch.manual_seed(seed)
    model = make().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    model.save_pretrained(directory)
    return directory


def weights_of(directory: Path, *, as_one: bool = False) -> dict[str, Tensor]:
    """A checkpoint's tensors, with fused projections `as_one`."""
    tensors = load_file(directory / "model.safetensors")
    return fused(tensors) if as_one else tensors


def save_changed(source: Path, target: Path, change) -> Path:
    """A copy of a checkpoint with other tensors: what `change` makes of them."""
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    tensors = weights_of(source)
    save_file(change(tensors) or tensors, target / "model.safetensors", {"format": "pt"})
    return target


def drive(directory: Path, config: EngineConfig = FLOAT32, **options) -> Drive:
    """A service of its own weights."""
    loading = {
        name: options.pop(name) for name in ("native_operators", "quantization") if name in options
    }
    options.setdefault("page_size", 4)
    return Drive(load(directory, config, **loading), config, **options, **loading)


def request(length=9, num_tokens=8, *, first=5, scored=False, **sampling) -> GenerateRequest:
    ids = tuple((first + 7 * index) % VOCABULARY for index in range(length))
    settings = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        input_ids=ids,
        sampling=SamplingParams(max_new_tokens=num_tokens, **settings),
        logprobs=LogprobOptions(prompt_start=0, top_k=1) if scored else None,
        detokenize=False,
    )


def answer(driven: Drive, wanted: GenerateRequest | None = None) -> tuple[tuple[int, ...], object]:
    """What a model says, token for token, and how sure it is of it."""
    output = driven.run(request(scored=True) if wanted is None else wanted)[0]
    completion = output.completions[0]
    return completion.token_ids, (output.prompt_logprobs, completion.logprobs)


@functools.cache
def answer_of(directory: Path, config: EngineConfig = FLOAT32, **options) -> object:
    """What a model says that was loaded from there and never changed."""
    return answer(drive(directory, config, **options))


def check_spans(output: GenerateOutput, prompt: tuple[int, ...], models: dict[str, Drive]) -> None:
    """Every greedy token is the likeliest by the version that is said to have computed it."""
    for completion in output.completions:
        assert sum(count for _, count in completion.weight_versions) == len(completion.token_ids)
        at = 0
        for version, count in completion.weight_versions:
            for token in completion.token_ids[at : at + count]:
                best = models[version].likeliest((*prompt, *completion.token_ids[:at]))
                assert token == best, f"token {at} is not of {version}"
                at += 1


class Oracle(Drive):
    """Tells what comes next by one version of the weights, and computes it once."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._known: dict[tuple[int, ...], int] = {}

    def likeliest(self, ids: tuple[int, ...]) -> int:
        if ids not in self._known:
            self._known[ids] = self._next(ids)
        return self._known[ids]

    def _next(self, ids: tuple[int, ...]) -> int:
        wanted = GenerateRequest(
            input_ids=ids,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True),
            detokenize=False,
        )
        return self.run(wanted)[0].completions[0].token_ids[0]


def oracle(directory: Path, **options) -> Oracle:
    return Oracle(load(directory, **options), FLOAT32, page_size=4, **options)


def tick(driven: Drive, count: int) -> None:
    for _ in range(count):
        driven.tick()


def paused(driven: Drive) -> None:
    assert driven.service.control(Pause(PauseMode.IN_PLACE))


def go_on(driven: Drive) -> None:
    assert driven.service.control(Continue())


def update(driven: Drive, directory: Path, version: str | None = None) -> None:
    assert driven.service.control(LoadWeights(str(directory), version))
