"""The `act` plugin: one request of one or several rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from phalanx.engine_config import get_engine_config
from phalanx.errors import CheckpointError
from phalanx.models.act.config import read_config
from phalanx.models.act.model import ACT
from phalanx.models.act.request import ACTArgs, ACTRequest
from phalanx.plugin import Entry, PolicyAdapter
from phalanx.processing.policy.tensor_check import check_tensors
from phalanx.processing.policy.transition import STATE
from phalanx.schema.limits import Limits


class ACTEntry(Entry):
    """ACT from a directory of LeRobot."""

    name = "act"
    args_cls = ACTArgs
    request_cls = ACTRequest
    output_cls = Tensor

    @staticmethod
    def validate(request: ACTRequest, limits: Limits) -> None:
        check_tensors({**request.images, STATE: request.state}, limits)

    @classmethod
    def policy(cls, args: ACTArgs, settings: Mapping[str, Any]) -> PolicyAdapter:
        from phalanx.models.act.serving import ACTServing

        return ACTServing(args, settings)

    def setup(self, args: ACTArgs) -> None:
        device = get_engine_config().device
        self._to = (device.target, device.torch_dtype)
        config, features = read_config(Path(args.checkpoint_dir))
        self._model = ACT(config, features).eval()
        load_weights(self._model, Path(args.checkpoint_dir) / "model.safetensors")
        self._model.to(*self._to)
        shapes: dict[str, tuple[int, ...]] = {**features.cameras, STATE: (features.state_dim or 0,)}
        self._limits = Limits(max_batch_size=args.max_batch_size, row_shapes=shapes)

    @property
    def limits(self) -> Limits:
        return self._limits

    def step(self, request: ACTRequest) -> Tensor:
        images = {name: image.to(*self._to) for name, image in request.images.items()}
        actions: Tensor = self._model(images, request.state.to(*self._to))
        return actions.clone()


def load_weights(model: ACT, path: Path) -> None:
    """Raises `CheckpointError` naming tensors that are missing, unknown or misshapen."""
    try:
        tensors = load_file(path)
        # The encoder of the latent is for training.
        needed = {name: each for name, each in tensors.items() if "vae_encoder" not in name}
        model.load_state_dict({name.removeprefix("model."): needed[name] for name in needed})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
