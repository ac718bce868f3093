"""Names of a pi policy's tensors as openpi writes them; LeRobot writes `model.` before each."""

from __future__ import annotations

_PALIGEMMA = "paligemma_with_expert.paligemma"
VISION = f"{_PALIGEMMA}.model.vision_tower.vision_model"
PROJECTOR = f"{_PALIGEMMA}.model.multi_modal_projector.linear"
TEXT = f"{_PALIGEMMA}.model.language_model"
EMBEDDING = f"{TEXT}.embed_tokens.weight"
LM_HEAD = f"{_PALIGEMMA}.lm_head.weight"
EXPERT = "paligemma_with_expert.gemma_expert.model"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


def plain_name(name: str) -> str:
    """A tensor's name without what LeRobot writes before it."""
    return name.removeprefix("model.")
