"""A policy whose ranks can be told when to die, and to begin otherwise than the others.

A module of its own: worker processes import it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace

from phalanx.models.cosmos3.args import Cosmos3PolicyArgs
from phalanx.models.cosmos3.entry import Cosmos3Policy
from phalanx.parallel.current import current_mesh

LOADING, ENCODE, READ, DENOISE, DECODE = -1, 0, 1, 3, 6
"""After how many steps a rank dies: those of a request of 4 steps from pixels to pixels."""


@dataclass(frozen=True)
class DeadlyArgs(Cosmos3PolicyArgs):
    """`rank` dies when so many steps are done; or its noise or its weights are others."""

    rank: int = 1
    dies_at: int | None = None
    other_seed: bool = False
    other_checkpoint: str | None = None


class DeadlyPolicy(Cosmos3Policy):
    name = "deadly_cosmos3"
    args_cls = DeadlyArgs

    def load(self, args):
        mesh = current_mesh()
        self._args = args
        self._chosen = mesh is not None and mesh.rank == args.rank
        if self._chosen and args.dies_at == LOADING:
            _die()
        if self._chosen and args.other_checkpoint is not None:
            args = replace(args, checkpoint_dir=args.other_checkpoint)
        return super().load(Cosmos3PolicyArgs(**_plain(args)))

    def start(self, rid, request):
        if self._chosen and self._args.other_seed:
            request = replace(request, seed=request.seed + 1)
        super().start(rid, request)

    def tick(self):
        if self._chosen and self.busy and self.statistics().num_steps == self._args.dies_at:
            _die()
        return super().tick()


def _plain(args: DeadlyArgs) -> dict[str, object]:
    names = ("checkpoint_dir", "max_batch_size", "max_tokens", "decode_video", "native_operators")
    return {name: getattr(args, name) for name in names}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
