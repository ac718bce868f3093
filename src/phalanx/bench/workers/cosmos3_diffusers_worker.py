"""diffusers' own pipeline on the same checkpoint, with given tokens and latents: its tokenizer and its
autoencoder have nothing to do.
"""

from __future__ import annotations

import time
from typing import Any

import diffusers  # type: ignore[import-not-found]
import torch
from cosmos3_protocol import (  # type: ignore[import-not-found]
    DOMAIN,
    Floats,
    Inputs,
    Start,
    arguments,
    no_actions,
    serve,
)
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (  # type: ignore[import-not-found]
    Cosmos3OmniPipeline,
    CosmosActionCondition,
)
from transformers import AutoTokenizer

TIER = 256


class GivenPipeline(Cosmos3OmniPipeline):  # type: ignore[misc]
    """Takes the texts' tokens and the picture's latents of `given`; all that computes is inherited."""

    given: Inputs

    def tokenize_prompt(self, *_: object, **__: object) -> tuple[list[int], list[int]]:
        return self.given.prompt, self.given.negative

    def _encode_video(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.given.noise).to(x.dtype)


class Diffusers:
    def __init__(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        dtype = getattr(torch, start.dtype)
        folder = start.checkpoint
        transformer = diffusers.Cosmos3OmniTransformer.from_pretrained(
            folder, subfolder="transformer", torch_dtype=dtype
        )
        self._pipeline = GivenPipeline(
            transformer.eval(),
            AutoTokenizer.from_pretrained(f"{folder}/text_tokenizer"),
            diffusers.AutoencoderKLWan.from_pretrained(folder, subfolder="vae"),
            diffusers.UniPCMultistepScheduler.from_pretrained(folder, subfolder="scheduler"),
            enable_safety_checker=False,
        )
        self._pipeline.set_progress_bar_config(disable=True)

    def latents(self, inputs: Inputs) -> tuple[Floats, Floats]:
        self._pipeline.given = inputs
        values = {
            "latents": torch.from_numpy(inputs.noise.copy()),
            "output_type": "latent",
            **arguments(inputs),
        }
        if inputs.case.action_rows:
            values |= self._of_actions(inputs)
        else:
            case = inputs.case
            values |= {"num_frames": case.frames, "height": case.height, "width": case.width}
        found = self._pipeline("given", **values)
        video = found.video.float().numpy()
        return video, found.action[0].float().numpy() if inputs.case.action_rows else no_actions()

    def processor_s(self) -> dict[int, float]:
        return {0: time.process_time()}

    def rate(self) -> float:
        raise NotImplementedError("the rate of the device is measured beside Phalanx")

    def describe(self) -> str:
        return f"diffusers {diffusers.__version__}, torch {torch.__version__}"

    def close(self) -> None: ...

    def _of_actions(self, inputs: Inputs) -> dict[str, Any]:
        picture = torch.zeros(3, inputs.case.height, inputs.case.width)
        condition = CosmosActionCondition(
            "policy", inputs.case.action_rows, DOMAIN, resolution_tier=TIER, image=picture
        )
        noise = torch.from_numpy(inputs.action_noise.copy())
        return {"action": condition, "action_latents": noise}


if __name__ == "__main__":
    serve(Diffusers)
