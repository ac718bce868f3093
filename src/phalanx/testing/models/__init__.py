"""Small models of random weights, one for each shape of model that the step engine serves."""

from __future__ import annotations

from phalanx.testing.model_parts import ModelParts
from phalanx.testing.models.decoder import decoder_parts
from phalanx.testing.models.encoder_decoder import TranslateRequest, encoder_decoder_parts
from phalanx.testing.models.flow_request import FlowRequest
from phalanx.testing.models.guided_flow import guided_flow_parts
from phalanx.testing.models.recurrent import RECURRENT_PLACE, recurrent_parts
from phalanx.testing.models.stateless import VectorRequest, stateless_parts

__all__ = [
    "RECURRENT_PLACE",
    "FlowRequest",
    "ModelParts",
    "TranslateRequest",
    "VectorRequest",
    "decoder_parts",
    "encoder_decoder_parts",
    "guided_flow_parts",
    "recurrent_parts",
    "stateless_parts",
]
