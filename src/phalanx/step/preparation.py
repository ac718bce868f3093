"""What each row of a batch computes with: its own inputs, and what the step before it gave.

A node's `prepare_inputs` takes all that a step needs of the requests' states, which go on while
the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from phalanx.step.attempt import attempt, attempt_each
from phalanx.step.batch import ExecutingBatch
from phalanx.step.outputs import NodeOutputs
from phalanx.step.submodule import NodeSubmodule, StepRow


def prepare(submodule: NodeSubmodule, batch: ExecutingBatch) -> None:
    """Ask for each row's inputs; rows that fail or are left out leave the batch."""
    rows: list[StepRow] = []
    inputs: list[Any] = []
    for row, given, error in attempt_each(
        partial(submodule.prepare_inputs, batch.walk), batch.rows
    ):
        if error is not None:
            batch.register_failure(row.request_id, error)
        elif given is None:
            batch.skipped.add(row.request_id)
        else:
            rows.append(row)
            inputs.append(given)
    batch.register_inputs(rows, inputs)
    _choose_path(submodule, batch)


def thread(submodule: NodeSubmodule, batch: ExecutingBatch, before: Sequence[NodeOutputs]) -> None:
    """Complete the inputs of rows that were prepared ahead with what the step before them gave.

    Rows that it gave nothing leave the batch. If the node fails, they fail; others go on.
    """
    if not any(row.ahead for row in batch.rows):
        return
    made = attempt(partial(_threaded, submodule, batch, before))
    if made.value is None:
        assert made.error is not None
        ahead = [row.request_id for row in batch.rows if row.ahead]
        for rid in ahead:
            batch.register_failure(rid, made.error)
        batch.drop_rows(ahead)
        return
    batch.skipped.update(row.request_id for row, given in made.value if given is None)
    kept = [(row, given) for row, given in made.value if given is not None]
    batch.register_inputs([row for row, _ in kept], [given for _, given in kept])


def _threaded(
    submodule: NodeSubmodule, batch: ExecutingBatch, before: Sequence[NodeOutputs]
) -> list[tuple[StepRow, Any]]:
    assert batch.inputs is not None, "prepare_inputs comes before thread_outputs"
    given = submodule.thread_outputs(batch.walk, batch.rows, batch.inputs, before)
    return list(zip(batch.rows, given, strict=True))


def _choose_path(submodule: NodeSubmodule, batch: ExecutingBatch) -> None:
    """Batched or row by row, as the node says; a node that cannot say fails the rows."""
    rows, inputs = batch.rows, batch.inputs
    if not rows:
        return
    assert inputs is not None
    made = attempt(partial(_batches, submodule, batch.walk, rows, inputs))
    if made.error is None:
        batch.running_batched = bool(made.value)
        return
    for row in rows:
        batch.register_failure(row.request_id, made.error)
    batch.register_inputs((), ())


def _batches(
    submodule: NodeSubmodule, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
) -> bool:
    limit = submodule.max_batch_size(walk)
    return (limit is None or len(rows) <= limit) and submodule.can_batch(walk, rows, inputs)
