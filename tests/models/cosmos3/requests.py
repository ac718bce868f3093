"""Requests and limits of the stored tiny checkpoint, each right as it is."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.models.cosmos3.args import Cosmos3Args
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.request import Cosmos3ActionRequest, Cosmos3T2VRequest
from phalanx.models.cosmos3.validation import limits_of
from phalanx.schema.limits import Limits
from tests.models.cosmos3.stored import document

VIDEO = (3, 3, 4)


def limits(max_tokens: int = 64, max_text_tokens: int = 16) -> Limits:
    args = Cosmos3Args("somewhere", max_tokens=max_tokens, max_text_tokens=max_text_tokens)
    return limits_of(Cosmos3Config.from_json(document("silu/config")), args)


def video_request(**changes: object) -> Cosmos3T2VRequest:
    request = Cosmos3T2VRequest(
        text_ids=torch.arange(9)[None],
        text_mask=torch.ones(1, 9, dtype=torch.int64),
        neg_text_ids=torch.arange(5)[None],
        neg_text_mask=torch.ones(1, 5, dtype=torch.int64),
        video_shape=VIDEO,
        num_inference_steps=4,
    )
    return replace(request, **changes)


def action_request(**changes: object) -> Cosmos3ActionRequest:
    request = Cosmos3ActionRequest(
        text_ids=torch.arange(9)[None],
        text_mask=torch.ones(1, 9, dtype=torch.int64),
        neg_text_ids=None,
        neg_text_mask=None,
        video_shape=VIDEO,
        mode="policy",
        domain_id=8,
        action_chunk=8,
        raw_action_dim=10,
        action_dim=12,
        cond_video_pixels=torch.zeros(1, 3, 1, 48, 64),
        num_inference_steps=4,
    )
    return replace(request, **changes)
