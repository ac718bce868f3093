"""Walks: a model of several nodes as named graphs of nodes, in sequence, in parallel and in loops,
in partitions that are joined by streams; one request goes through them node by node.
"""

from __future__ import annotations

from phalanx.loop.walks.chunk_policy import ChunkPolicy, Fixed, LeftContext, Sliding
from phalanx.loop.walks.model import Emitted, FinishedWalk, NextWalk, Values, WalkModel
from phalanx.loop.walks.node import WalkNode, walk_request
from phalanx.loop.walks.node_run import WalkInputs
from phalanx.loop.walks.program import WalkProgram
from phalanx.loop.walks.request import WalkRequest
from phalanx.loop.walks.sections import (
    EMIT_TO_CLIENT,
    NOWHERE,
    Edge,
    Loop,
    Node,
    Parallel,
    Section,
    Sequential,
)
from phalanx.loop.walks.stream_buffer import Chunk, StreamBuffer
from phalanx.loop.walks.walk_graph import Partition, Stream, WalkGraph

__all__ = [
    "EMIT_TO_CLIENT",
    "NOWHERE",
    "Chunk",
    "ChunkPolicy",
    "Edge",
    "Emitted",
    "FinishedWalk",
    "Fixed",
    "LeftContext",
    "Loop",
    "NextWalk",
    "Node",
    "Parallel",
    "Partition",
    "Section",
    "Sequential",
    "Sliding",
    "Stream",
    "StreamBuffer",
    "Values",
    "WalkGraph",
    "WalkInputs",
    "WalkModel",
    "WalkNode",
    "WalkProgram",
    "WalkRequest",
    "walk_request",
]
