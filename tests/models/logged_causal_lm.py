"""A `causal_lm` that writes down what each of its steps held, to compare the ranks of a replica."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import ConfigurationError
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.models.causal_lm.loading import LoadedModel, build_service, load_model
from phalanx.models.causal_lm.node import DecoderNode
from phalanx.models.causal_lm.sequence import NODE
from phalanx.models.causal_lm.sequence import Sequence as TokenSequence
from phalanx.parallel.ranks import Ranks
from phalanx.schema.events import Event
from phalanx.step.submodule import EngineInputs

Line = dict[str, Any]


@dataclass(frozen=True)
class _Running:
    rid: str
    state: TokenSequence
    num_push_backs: int

    @property
    def was_pushed_back(self) -> bool:
        return self.state.num_push_backs > self.num_push_backs


class LoggedNode(DecoderNode):
    """Notes each step's batch, `{"node", "walk", "rows": [[request id, span], ...]}`, before it is
    computed, and at the end of a tick who was pushed back in it, `{"pushed_back": [ids]}`.
    """

    def __init__(self, model: LoadedModel, max_batch: int, note: Callable[[Line], None]) -> None:
        super().__init__(model.decoder, model.backend, max_batch)
        self._note = note
        self._running: dict[str, _Running] = {}
        self._released: list[_Running] = []

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:
        for row in engine.rows:
            state: TokenSequence = row.info.state
            self._running[row.request_id] = _Running(row.request_id, state, state.num_push_backs)
        rows = [[row.request_id, row.span] for row in engine.rows]
        self._note({"node": NODE, "walk": engine.walk, "rows": rows})
        return super().preprocess(engine, inputs)

    def cleanup_request(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            self._released.append(running)

    def end_tick(self) -> None:
        """Of those who left since the last call, note who is to come back."""
        pushed_back = [one.rid for one in self._released if one.was_pushed_back]
        self._released.clear()
        if pushed_back:
            self._note({"pushed_back": pushed_back})


@dataclass(frozen=True)
class LoggedCausalLMArgs(CausalLMArgs):
    """`log_dir`: an existing directory; each rank writes a file of its own there."""

    log_dir: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.log_dir or "/nowhere").is_dir():
            raise ConfigurationError(f"log_dir={self.log_dir!r} must be an existing directory")


class LoggedCausalLM(CausalLM):
    """Writes `replica-<pid of its rank 0>-rank-<rank>.jsonl` as `LoggedNode` notes it, with `tick`.

    A tick that computes nothing leaves no line.
    """

    name = "logged_causal_lm"
    args_cls = LoggedCausalLMArgs

    _node: LoggedNode

    def setup(self, args: LoggedCausalLMArgs) -> None:
        model = load_model(args)
        path = Path(args.log_dir) / log_name(replica_of(model.ranks), model.ranks.rank)
        self._file = path.open("w", buffering=1)
        self._num_ticks = 0
        self._node = LoggedNode(model, args.max_batch_size, self._write)
        self._service = build_service(model, args, self._node)

    def tick(self) -> Sequence[Event]:
        self._num_ticks += 1
        events = super().tick()
        self._node.end_tick()
        return events

    def close(self) -> None:
        super().close()
        self._file.close()

    def _write(self, line: Line) -> None:
        self._file.write(json.dumps({"tick": self._num_ticks, **line}) + "\n")


def log_name(replica: int, rank: int) -> str:
    return f"replica-{replica}-rank-{rank}.jsonl"


def replica_of(ranks: Ranks) -> int:
    """A number that the ranks of one replica share: the process id of the first."""
    number = torch.tensor([os.getpid()])
    ranks.take_first(number)
    return int(number)


def read_logs(log_dir: Path) -> dict[str, list[list[Line]]]:
    """By replica, the lines of each rank in the order of the ranks."""
    found: dict[str, list[list[Line]]] = {}
    for path in sorted(log_dir.glob("replica-*-rank-*.jsonl"), key=_replica_and_rank):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.setdefault(_replica_and_rank(path)[0], []).append(lines)
    return found


def _replica_and_rank(path: Path) -> tuple[str, int]:
    _, replica, _, rank = path.stem.split("-")
    return replica, int(rank)
