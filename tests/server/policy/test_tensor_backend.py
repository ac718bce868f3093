"""A plugin of tensors that is served without an adapter of its own."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import numpy as np
import pytest
import torch

from phalanx import Engine
from phalanx.engine_config import EngineArgs, EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.plugin import Entry
from phalanx.schema.observation import Observation
from phalanx.schema.server_config import ServerConfig
from phalanx.server.backends.tensor import TensorBackend
from tests.server.policy.running import CONFIG, RunningPolicy, seen


@dataclass(frozen=True)
class ScaleArgs(EntryArgs):
    """Nothing to choose."""


@dataclass(frozen=True)
class ScaleRequest:
    x: torch.Tensor
    factor: float = 1.0
    name: str = "output"


@Engine.register
class Scale(Entry):
    """Multiplies."""

    name = "test_scale"
    args_cls = ScaleArgs
    request_cls = ScaleRequest
    output_cls = object

    def setup(self, args: ScaleArgs) -> None:
        pass

    def step(self, request: ScaleRequest) -> object:
        scaled = request.x * request.factor
        return scaled if request.name == "output" else {request.name: scaled.to(torch.bfloat16)}


REQUEST_TYPE = f"{__name__}:ScaleRequest"


@pytest.fixture(scope="module")
def client():
    server = RunningPolicy(
        lambda: Engine(EngineArgs(Scale.name, ScaleArgs(), CONFIG)),
        TensorBackend(ScaleArgs(), request_type=REQUEST_TYPE),
        ServerConfig(port=0),
    )
    server.ready.result()
    with server.client() as client:
        yield client
    server.stop()
    server.join()


def test_inputs_and_parameters_become_a_request_and_its_output_outputs(client):
    x = np.array([[1, 2], [3, 4]], np.float32)
    answer = client.infer(Observation(inputs={"x": x}, parameters={"factor": 2.0}))
    assert np.array_equal(answer.actions.outputs["output"], 2 * x)
    assert answer.actions.values.size == 0


def test_named_outputs_of_16_bits_are_answered_as_32(client):
    x = np.array([1.5], np.float32)
    answer = client.infer(Observation(inputs={"x": x}, parameters={"name": "scaled"}))
    assert answer.actions.outputs["scaled"].dtype == np.float32
    assert answer.actions.outputs["scaled"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (Observation(), "the inputs do not make a request"),
        (Observation(inputs={"y": np.zeros(2)}), "unexpected keyword argument 'y'"),
        (seen(), "this model takes tensors, not images"),
        (
            Observation(inputs={"x": np.zeros(2)}, parameters={"x": 1}),
            "'x' is both an input and a parameter",
        ),
    ],
)
def test_what_makes_no_request_is_refused_in_words(client, observation, words):
    code, details = client.refused(observation)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


def test_a_request_type_that_is_not_there():
    with pytest.raises(ConfigurationError, match="adapter.args.request_type='a.b:C' cannot be"):
        TensorBackend(ScaleArgs(), request_type="a.b:C")
