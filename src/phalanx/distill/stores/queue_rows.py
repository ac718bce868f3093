"""Puts published samples into TransferQueue in the form of its own readers: a row a sample, a column
of tensors for each thing that is known of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from phalanx.distill.sample import Sample
from phalanx.distill.stores.base import StoredBatch
from phalanx.distill.support import fields_of
from phalanx.errors import InvalidRequestError, MissingDependencyError


class _Queue(Protocol):
    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: object,
        tags: list[dict[str, object]],
    ) -> object: ...


class _TensorDicts(Protocol):
    def TensorDict(self, source: Mapping[str, Tensor], batch_size: list[int]) -> object: ...


class QueueRows:
    """A `publish_rows` of `TransferQueueStore`: rows `BATCH/SAMPLE` of `partition`, all in one call,
    with tags that tell batch, group, index, and which row is the last.
    """

    def __init__(self, partition: str = "train") -> None:
        try:
            self._queue = cast(_Queue, import_module("transfer_queue"))
            self._dicts = cast(_TensorDicts, import_module("tensordict"))
        except ImportError as error:
            raise MissingDependencyError(
                f"QueueRows needs {error.name}; install it with `pip install"
                " phalanx[transferqueue]`"
            ) from error
        self.partition = partition

    def __call__(self, batch: StoredBatch) -> None:
        samples = batch.samples
        rows = self._dicts.TensorDict(columns_of(samples), batch_size=[len(samples)])
        tags: list[dict[str, object]] = [
            {
                "batch_id": batch.batch_id,
                "group_id": one.group_id,
                "index": one.index,
                "is_last": one is samples[-1],
            }
            for one in samples
        ]
        keys = [f"{batch.batch_id}/{one.sample_id}" for one in samples]
        self._queue.kv_batch_put(keys, self.partition, fields=rows, tags=tags)


def columns_of(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Jagged tensors of scored samples, by the names that trainers know. Tables of all samples have
    one width: narrower ones end in zeros.
    """
    columns: dict[str, list[Tensor]] = {}

    def add(name: str, value: object, kind: type[np.generic]) -> None:
        columns.setdefault(name, []).append(torch.from_numpy(np.array(value, dtype=kind)))

    for one in samples:
        add("prompt_ids", one.prompt_ids, np.int64)
        add("response_ids", one.response_ids, np.int64)
        add("rollout_log_probs", one.rollout_log_probs, np.float32)
        add("reward", [np.nan if one.reward is None else one.reward], np.float32)
        for name, value in fields_of(one).items():
            is_id = value.dtype.kind == "i"
            add(name, value, np.int64 if is_id else np.float32)
    for name, values in columns.items():
        if len(values) != len(samples):
            raise InvalidRequestError(
                f"{len(values)} of {len(samples)} samples have {name}; put samples of different"
                " selections into separate batches",
                field=name,
            )
    return {name: _jagged(values) for name, values in columns.items()}


def _jagged(values: Sequence[Tensor]) -> Tensor:
    """One nested tensor [samples, (tokens), ...] of tensors that differ in their tokens."""
    if values[0].dim() == 2:
        width = max(one.shape[1] for one in values)
        padded = [torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in values]
        return torch.nested.as_nested_tensor(padded, layout=torch.jagged)
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
