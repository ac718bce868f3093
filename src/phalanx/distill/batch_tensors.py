"""A published batch as tensors: prompts and responses in rows, padded at their ends, and beside each
token of a response what student and teacher said of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.distill.sample import Sample
from phalanx.distill.token_table import SupportTable
from phalanx.errors import InvalidRequestError


@dataclass(frozen=True)
class BatchTensors:
    """`b` samples, sequences padded to `l` tokens, responses to `r`, supports to `k`.

    `logit_index` says at which position of the sequence the logits are that predict a token of the
    response: the one before it. `mask` is 1 for tokens of a response and 0 for padding, and may hold
    other weights, see `weighted`. Where a sample's support is smaller than `k`, `support_valid` is
    False.
    """

    input_ids: Tensor
    """int64 [b, l]."""
    attention_mask: Tensor
    """int64 [b, l], 1 for tokens."""
    response_ids: Tensor
    """int64 [b, r]."""
    logit_index: Tensor
    """int64 [b, r]."""
    mask: Tensor
    """float32 [b, r]."""
    rollout_log_probs: Tensor
    """float32 [b, r], the student's when it sampled."""
    teacher_log_probs: Tensor
    """float32 [b, r]."""
    rewards: Tensor
    """float32 [b], not a number where there is none."""
    support_ids: Tensor | None = None
    """int64 [b, r, k]."""
    support_valid: Tensor | None = None
    """bool [b, r, k]."""
    support_teacher: Tensor | None = None
    """float32 [b, r, k]."""
    support_student: Tensor | None = None
    """float32 [b, r, k], the student's when it sampled; None where it was not scored there."""

    @property
    def num_tokens(self) -> int:
        """Tokens of responses that count: without padding, and without those of weight 0."""
        return int((self.mask != 0).sum())

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def rows(self, start: int, end: int) -> Self:
        """The samples from `start` to `end`, for a step in smaller parts; padding stays."""
        return self._each(lambda tensor: tensor[start:end])

    def weighted(self, weights: Tensor) -> Self:
        """The same with weights for its tokens: [b] for whole samples, or [b, r]."""
        if weights.shape == self.mask.shape[:1]:
            weights = weights[:, None]
        elif weights.shape != self.mask.shape:
            raise InvalidRequestError(
                f"weights are {list(weights.shape)}; give [{self.mask.shape[0]}] or"
                f" {list(self.mask.shape)}",
                field="weights",
            )
        return replace(self, mask=self.mask * weights.to(self.mask))

    def response_logits(self, logits: Tensor) -> Tensor:
        """Of a model's logits [b, l, vocabulary] those that predict responses: [b, r, vocabulary]."""
        index = self.logit_index[..., None].expand(-1, -1, logits.shape[-1])
        return logits.gather(1, index)

    def _each(self, act: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {}
        for one in fields(self):
            tensor = getattr(self, one.name)
            changed[one.name] = None if tensor is None else act(tensor)
        return replace(self, **changed)


def collate(samples: Sequence[Sample], *, pad_id: int = 0) -> BatchTensors:
    """The samples of a published batch, scored by a teacher, in their order.

    Samples of several selections do not go together: either all have a support, or none has.
    """
    if not samples:
        raise InvalidRequestError("there are no samples; give at least one", field="samples")
    lengths = [len(one.prompt_ids) + one.response_length for one in samples]
    longest = max(1, *(one.response_length for one in samples))
    shape = (len(samples), longest)
    ids = np.full((len(samples), max(lengths)), pad_id, np.int64)
    attention = np.zeros_like(ids)
    responses, index = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    mask, rollout, teacher = (np.zeros(shape, np.float32) for _ in range(3))
    for row, sample in enumerate(samples):
        length, start = sample.response_length, len(sample.prompt_ids)
        if sample.scores is None:
            raise InvalidRequestError(
                f"sample {sample.sample_id!r} has no teacher's scores; train on published batches",
                field="samples",
            )
        ids[row, : start + length] = (*sample.prompt_ids, *sample.response_ids)
        attention[row, : start + length] = 1
        responses[row, :length] = sample.response_ids
        index[row, :length] = np.arange(start - 1, start - 1 + length)
        mask[row, :length] = 1
        rollout[row, :length] = sample.rollout_log_probs
        teacher[row, :length] = sample.scores.teacher_log_probs
    rewards = [np.nan if one.reward is None else one.reward for one in samples]
    return BatchTensors(
        torch.from_numpy(ids),
        torch.from_numpy(attention),
        torch.from_numpy(responses),
        torch.from_numpy(index),
        torch.from_numpy(mask),
        torch.from_numpy(rollout),
        torch.from_numpy(teacher),
        torch.tensor(rewards, dtype=torch.float32),
        *_supports(samples, shape),
    )


def _supports(
    samples: Sequence[Sample], shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Ids, validity, teacher and student, each [b, r, k]."""
    supports = [None if one.scores is None else one.scores.support for one in samples]
    there = [one for one in supports if one is not None]
    if not there:
        return None, None, None, None
    if len(there) != len(supports):
        raise InvalidRequestError(
            f"{len(there)} of {len(samples)} samples have a support; train on student_sampled and on"
            " other selections in separate batches",
            field="samples",
        )
    full = (*shape, max(one.width for one in there))
    ids, valid = np.zeros(full, np.int64), np.zeros(full, np.bool_)
    teacher, student = np.zeros(full, np.float32), np.zeros(full, np.float32)
    for row, one in enumerate(there):
        at = (row, slice(one.num_rows), slice(one.width))
        ids[at] = one.id_array
        valid[at] = np.arange(one.width) < one.size_array[:, None]
        teacher[at] = one.teacher_array
        student[at] = _student(one)
    has_student = all(one.student_array is not None for one in there)
    return (
        torch.from_numpy(ids),
        torch.from_numpy(valid),
        torch.from_numpy(teacher),
        torch.from_numpy(student) if has_student else None,
    )


def _student(support: SupportTable) -> NDArray[np.float32]:
    student = support.student_array
    return np.zeros((support.num_rows, support.width), np.float32) if student is None else student
