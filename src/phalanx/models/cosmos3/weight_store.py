"""The weights of a loaded Cosmos3, transformer and autoencoder: given up and brought back."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.errors import CheckpointError
from phalanx.layers.shells import drop_parameters, parameter_bytes
from phalanx.layers.weight_files import WeightOrigin
from phalanx.models.cosmos3.checkpoint import FOLDER, load_weights
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.models.cosmos3.vae import checkpoint as vae_checkpoint
from phalanx.models.cosmos3.vae.codec import WanVae


class Cosmos3Weights:
    """See the module. Nobody replaces them: they come back from the files they were loaded from."""

    complete = True
    can_return = True

    def __init__(
        self,
        transformer: Cosmos3Transformer,
        vae: WanVae,
        directory: Path,
        device: torch.device,
        *,
        strict: bool,
    ) -> None:
        """`transformer` and `vae` have been loaded from `directory`; `strict` as of `load_weights`."""
        self._transformer = transformer
        self._vae = vae
        self._directory = directory
        self._device = device
        self._strict = strict
        self._origin = WeightOrigin.of(directory / FOLDER, directory / vae_checkpoint.FOLDER)

    @property
    def num_bytes(self) -> int:
        """Memory that all of them hold, in every form."""
        return parameter_bytes(self._transformer) + parameter_bytes(self._vae)

    def release(self) -> None:
        """Give up every weight, in every form."""
        drop_parameters(self._transformer)
        drop_parameters(self._vae)

    def restore(self) -> None:
        """Read all weights again. Raises `CheckpointError` where their files have changed."""
        if not self._origin.unchanged:
            raise CheckpointError(
                f"the weights in {self._directory} are not those any more that were loaded; put "
                "those back, or start the server anew to serve the others"
            )
        load_weights(self._transformer, self._directory, self._device, strict=self._strict)
        vae_checkpoint.fill_vae(self._vae, self._directory, self._device)
