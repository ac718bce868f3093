"""LeRobot's own pi0.5: `predict_action_chunk`, with the same noise.

LeRobot knows two sizes of its language models and one of its vision tower, by name; a model of other
sizes is built here from the same classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import lerobot  # type: ignore[import-not-found]
import torch
import transformers
from lerobot.configs import PreTrainedConfig  # type: ignore[import-not-found]
from lerobot.policies.pi05 import modeling_pi05 as modeling  # type: ignore[import-not-found]
from policy_protocol import Floats, Observation, Start, serve  # type: ignore[import-not-found]
from safetensors.torch import load_file

UNUSED = ("lm_head.weight",)


class LeRobot:
    def __init__(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        self._versions = (
            f"lerobot {lerobot.__version__}, transformers {transformers.__version__}, torch "
            f"{torch.__version__}"
        )
        sizes = start.geometry
        modeling.get_gemma_config = lambda variant: _gemma(sizes, variant)
        modeling.PaliGemmaWithExpertModel = _resized(sizes)
        config = PreTrainedConfig.from_pretrained(start.checkpoint)
        config.dtype = start.dtype
        self._policy = modeling.PI05Policy(config)
        weights = load_file(f"{start.checkpoint}/model.safetensors")
        report = self._policy.load_state_dict(weights, strict=False)
        missing = [name for name in report.missing_keys if not name.endswith(UNUSED)]
        if missing or report.unexpected_keys:
            raise RuntimeError(f"missing {missing}, unexpected {report.unexpected_keys}")
        self._policy.eval()
        self._cameras = start.cameras

    def chunks(self, observations: Sequence[Observation]) -> list[Floats]:
        """One after another, as its policy server answers them."""
        return [self._chunk(each) for each in observations]

    def describe(self) -> str:
        return self._versions

    def close(self) -> None: ...

    def _chunk(self, observation: Observation) -> Floats:
        there = self._cameras[: observation.num_cameras]
        images = torch.from_numpy(observation.images)[:, None]
        batch = {
            "observation.language.tokens": torch.from_numpy(observation.tokens)[None],
            "observation.language.attention_mask": torch.from_numpy(observation.mask)[None],
            **{name: image for name, image in zip(there, images, strict=False)},
        }
        noise = torch.from_numpy(observation.noise)[None]
        actions = self._policy.predict_action_chunk(batch, noise=noise)
        found: Floats = actions[0].float().numpy()
        return found


def _gemma(sizes: dict[str, int], variant: str) -> modeling.GemmaConfig:
    """The language model's sizes, or the expert's."""
    part = "text" if variant == "gemma_2b" else "expert"
    return modeling.GemmaConfig(
        width=sizes[f"{part}_width"],
        depth=sizes["num_layers"],
        mlp_dim=sizes[f"{part}_inner_width"],
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
    )


def _resized(sizes: dict[str, int]) -> type:
    """Its class of the two models with other sizes; all that computes is inherited."""

    class Resized(modeling.PaliGemmaWithExpertModel):  # type: ignore[misc]
        def __init__(
            self,
            vlm_config: modeling.GemmaConfig,
            action_expert_config: modeling.GemmaConfig,
            *,
            precision: str,
            **_: object,
        ) -> None:
            torch.nn.Module.__init__(self)
            self.freeze_vision_encoder = self.train_expert_only = False
            vlm = modeling.CONFIG_MAPPING["paligemma"]()
            vlm.image_token_index = sizes["vocab_size"]
            _set(vlm.text_config, _text_sizes(vlm_config, sizes), None)
            _set(vlm.vision_config, _vision_sizes(sizes), None)
            expert = modeling.CONFIG_MAPPING["gemma"]()
            width = action_expert_config.width
            _set(expert, _text_sizes(action_expert_config, sizes), width)
            self.paligemma = modeling.PaliGemmaForConditionalGenerationWithPiGemma(config=vlm)
            self.gemma_expert = modeling.PiGemmaForCausalLM(config=expert)
            self.gemma_expert.model.embed_tokens = None
            self.to_bfloat16_for_selected_params(precision)

    return Resized


def _text_sizes(config: modeling.GemmaConfig, sizes: dict[str, int]) -> dict[str, object]:
    return {
        "hidden_size": config.width,
        "intermediate_size": config.mlp_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": config.depth,
        "head_dim": config.head_dim,
        "vocab_size": sizes["vocab_size"],
        "hidden_activation": "gelu_pytorch_tanh",
        "dtype": "float32",
        "use_adarms": False,
        "adarms_cond_dim": None,
    }


def _vision_sizes(sizes: dict[str, int]) -> dict[str, object]:
    return {
        "hidden_size": sizes["vision_width"],
        "intermediate_size": sizes["vision_inner_width"],
        "num_hidden_layers": sizes["vision_num_layers"],
        "num_attention_heads": sizes["vision_num_heads"],
        "patch_size": sizes["patch_size"],
        "image_size": sizes["image_size"],
        "projection_dim": sizes["text_width"],
        "dtype": "float32",
    }


def _set(
    config: transformers.PretrainedConfig, values: dict[str, object], conditioned_width: int | None
) -> None:
    for name, value in values.items():
        setattr(config, name, value)
    if conditioned_width is not None:
        config.use_adarms, config.adarms_cond_dim = True, conditioned_width


if __name__ == "__main__":
    serve(LeRobot)
