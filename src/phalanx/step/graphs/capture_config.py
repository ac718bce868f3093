"""What a node wants captured of a walk: the whole forward, for some numbers of rows and tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from phalanx.step.graphs.shapes import Shapes
from phalanx.step.lease import BucketKey


@dataclass(frozen=True)
class CaptureConfig:
    """Captures of `walk`; the walks in `aliases` replay them too.

    A batch is padded to the smallest of the `shapes` that it fits into. `key` is one of the node's
    answers to `capture_key`, where what is computed differs between batches of a walk.
    `caps_eager_batch_size`: no step of these walks has more rows than the largest shape.
    `compiles`: the captured callable is compiled first (never on a CPU).
    """

    walk: str
    shapes: Shapes = field(default_factory=Shapes)
    aliases: tuple[str, ...] = ()
    key: Hashable = None
    caps_eager_batch_size: bool = True
    compiles: bool = False

    @property
    def walks(self) -> frozenset[str]:
        """The walks that replay these captures."""
        return frozenset({self.walk, *self.aliases})

    def buckets(self) -> tuple[BucketKey, ...]:
        """The shapes, largest first."""
        return tuple(
            BucketKey(self.walk, rows, tokens, self.key, self.shapes.packed)
            for rows, tokens in self.shapes.sizes()
        )
