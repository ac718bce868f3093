"""Serves any plugin whose request is made of tensors: `inputs` of `robot.inference.v1` become
tensors and `extensions_json.parameters` further arguments, and the output becomes `outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.engine_config import EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.schema.observation import Actions, Observation, PolicyInfo
from phalanx.server.backends.importing import imported

OUTPUT = "output"
_NO_ACTIONS = np.zeros((0, 0), np.float32)


class TensorBackend:
    """`request_type` (`module:Class`) is called with tensors and parameters by name; without it the
    request is a dictionary of them. An output that is one tensor is called `output`.
    """

    def __init__(self, plugin_args: EntryArgs, request_type: str | None = None) -> None:
        self._plugin = type(plugin_args).__name__
        self._build: Callable[..., Any] = dict
        if request_type is not None:
            self._build = imported(request_type, "adapter.args.request_type")

    @property
    def info(self) -> PolicyInfo:
        """No cameras, no state, no actions of its own."""
        return PolicyInfo("tensors", (), None, 0, 0)

    def request(self, observation: Observation) -> Any:  # noqa: ANN401
        if observation.images or observation.state is not None:
            raise InvalidRequestError(
                "this model takes tensors, not images and a state; send them as inputs",
                field="images" if observation.images else "robot_state",
            )
        tensors = {name: _tensor(array) for name, array in observation.inputs.items()}
        twice = sorted(set(tensors) & set(observation.parameters))
        if twice:
            raise InvalidRequestError(
                f"{twice[0]!r} is both an input and a parameter", field=twice[0]
            )
        try:
            return self._build(**tensors, **observation.parameters)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the inputs do not make a request: {error}") from error

    def actions(self, output: Any, observation: Observation) -> Actions:  # noqa: ANN401
        if isinstance(output, torch.Tensor):
            output = {OUTPUT: output}
        if not isinstance(output, Mapping):
            raise TypeError(f"the output is {type(output).__name__}, not tensors")
        values = _NO_ACTIONS
        if observation.batched:
            values = np.zeros((observation.num_rows, 0, 0), np.float32)
        return Actions(values, {str(name): _array(each) for name, each in output.items()})


def _tensor(array: NDArray[np.generic]) -> torch.Tensor:
    # A copy: what arrived is read-only, and a tensor never is.
    return torch.from_numpy(np.array(array))


def _array(value: Any) -> NDArray[np.generic]:  # noqa: ANN401
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    tensor = value.detach().cpu()
    array: NDArray[np.generic] = (
        tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    ).numpy()
    return array
