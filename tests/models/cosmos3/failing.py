"""A policy of which one rank cannot encode what it is given.

A module of its own: worker processes import it.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.models.cosmos3.args import Cosmos3PolicyArgs
from phalanx.models.cosmos3.building import build_service, load_model
from phalanx.models.cosmos3.entry import Cosmos3Policy
from phalanx.models.cosmos3.vae.codec import WanVae
from phalanx.parallel.current import default_mesh


class Unable(WanVae):
    def encode(self, pixels, piece=None):
        raise RuntimeError("no memory")


class FailingPolicy(Cosmos3Policy):
    """Its second rank computes everything but latents of pixels."""

    name = "failing_cosmos3"

    def load(self, args: Cosmos3PolicyArgs):
        model = load_model(args)
        if default_mesh().rank == 1:
            model = replace(model, vae=Unable(model.vae.config))
        return build_service(model, args, self.answer)

    @staticmethod
    def answer(row):
        return row.latents.vision.shape
