"""Decoding that replays captured steps gives what it gives eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.device import create_backend
from phalanx.device.cpu import CpuBackend
from phalanx.engine_config import DeviceConfig, EngineConfig
from phalanx.errors import ConfigurationError
from phalanx.models.causal_lm.sequence import NODE
from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive, load

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "sampling_seed": 3},
    {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.4, "sampling_seed": 4},
    {"temperature": 0.7, "min_p": 0.1, "min_new_tokens": 4, "sampling_seed": 5},
    {"temperature": 1.0, "logit_bias": ((7, 3.0), (11, -9.0)), "sampling_seed": 6},
]


def requests(ignore_eos: bool = True) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            input_ids=tuple(range(5 + 3 * index, 9 + 5 * index)),
            sampling=SamplingParams(max_new_tokens=6 + index, ignore_eos=ignore_eos, **settings),
        )
        for index, settings in enumerate(SETTINGS)
    ]


def ids(outputs) -> list[tuple[int, ...]]:
    return [output.completions[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load(tiny_dir, native_operators="off")


def drive(model, capture: str, **options) -> Drive:
    captured = replace(model, backend=CpuBackend(capture=capture))
    return Drive(captured, max_batch_size=4, context_length=64, page_size=4, **options)


def graphs_of(driven: Drive):
    return driven.service._engine._nodes[NODE].graphs._graphs


@pytest.mark.parametrize("capture", ["tape", "rerun"])
def test_captured_decoding_gives_the_eager_tokens(model, capture):
    eager = ids(drive(model, "off").run(*requests()))
    driven = drive(model, capture)
    assert {bucket.rows for bucket in graphs_of(driven).captures} == {1, 2, 4}
    assert graphs_of(driven).captures.refused == {}
    assert ids(driven.run(*requests())) == eager


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; none is visible to torch"
)
def test_cuda_graphs_give_the_eager_tokens(tiny_dir):
    config = EngineConfig(DeviceConfig("cuda", "float32"))
    model = load(tiny_dir, config)
    found = []
    for capture in ("off", "rerun", "graph"):
        captured = replace(model, backend=create_backend("cuda", capture=capture))
        driven = Drive(captured, config, max_batch_size=4, context_length=64, page_size=4)
        assert graphs_of(driven).captures.refused == {}
        assert bool(graphs_of(driven).captures) is (capture != "off")
        found.append(ids(driven.run(*requests())))
    assert found[0] == found[1] == found[2]


def test_decode_steps_call_no_forward_and_prefill_steps_do(model):
    driven = drive(model, "tape")
    node = driven.service._node
    forwards = []
    decoder = node.decoder
    decoder.register_forward_pre_hook(lambda module, args: forwards.append(len(args[0])))
    (output,) = driven.run(requests()[0])
    decoder._forward_pre_hooks.clear()
    assert len(output.completions[0].token_ids) == 6
    assert forwards == [4], "the prompt"


def test_what_the_host_must_see_is_computed_eagerly(model):
    sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
    plain = GenerateRequest(input_ids=(3, 4, 5), sampling=sampling)
    scored = GenerateRequest(
        input_ids=(3, 4, 5), sampling=sampling, logprobs=LogprobOptions(top_k=2)
    )
    found = []
    for capture in ("off", "tape"):
        outputs = drive(model, capture).run(plain, scored)
        found.append((ids(outputs), outputs[1].completions[0].logprobs.values))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)


def test_a_small_pool_pushes_back_and_gives_the_same(model):
    eager = ids(drive(model, "off").run(*requests()))
    driven = drive(model, "tape", pool_tokens=80, max_step_tokens=8)
    assert ids(driven.run(*requests())) == eager


def test_native_operators_are_refused_where_steps_are_captured_on_a_cpu(tiny_dir):
    native = load(tiny_dir, native_operators="auto")
    if native.operators.capturable:
        pytest.skip("there is no compiler, so plain torch serves")
    with pytest.raises(ConfigurationError, match="native_operators='off', or do not capture"):
        drive(native, "tape")
