"""What has to hold of a sample's outputs before anybody trains on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phalanx.distill.sample import Sample, TeacherRequest, TeacherScores, digest
from phalanx.distill.support import support_of
from phalanx.distill.token_table import TokenTable
from phalanx.errors import ScoresMisalignedError


def check_reward(sample: Sample) -> None:
    """Raise `ScoresMisalignedError` for a sample that no judge has graded."""
    if sample.reward is None or not math.isfinite(sample.reward):
        raise ScoresMisalignedError(
            f"sample {sample.sample_id!r} has reward {sample.reward}; a finite number is needed"
        )


def check_scores(sample: Sample, *, with_student: bool = True) -> None:
    """Raise `ScoresMisalignedError` for teacher's outputs that are missing, not finite, of another
    length than the response, or of other tokens.

    `with_student` asks for the student's scores at the teacher's tokens, where they are wanted.
    """
    request, scores = sample.teacher, sample.scores
    if request is None:
        raise _wrong(sample, "teacher", "is missing; say what its teacher is asked")
    if scores is None:
        raise _wrong(sample, "scores", "are missing; no teacher has read it")
    if scores.asked != digest(sample):
        raise _wrong(sample, "scores", "belong to another request, prompt or response")
    _check_log_probs(sample, scores.teacher_log_probs)
    _check_tables(sample, request, scores, with_student)
    if scores.support != support_of(
        request.selection,
        sample.student_topk,
        scores.teacher_topk,
        scores.teacher_at_student_topk,
        scores.student_at_teacher_topk,
    ):
        raise _wrong(sample, "support", "is not what its tables say")


def check_order(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    """Raise `ScoresMisalignedError` where a sample is missing, new, moved, or of another answer."""
    if len(before) != len(after):
        raise ScoresMisalignedError(f"{len(after)} samples came back of {len(before)}")
    for place, (one, other) in enumerate(zip(before, after, strict=True)):
        if _identity(one) != _identity(other):
            raise ScoresMisalignedError(
                f"sample {place} is {other.sample_id!r} of group {other.group_id!r}; it was"
                f" {one.sample_id!r} of {one.group_id!r}, with the same tokens"
            )


def _identity(sample: Sample) -> tuple[object, ...]:
    return (
        sample.sample_id,
        sample.group_id,
        sample.index,
        sample.prompt_ids,
        sample.response_ids,
        sample.rollout_log_probs,
        sample.weight_versions,
    )


def _check_log_probs(sample: Sample, values: Sequence[float]) -> None:
    if len(values) != sample.response_length:
        raise _wrong(
            sample,
            "teacher_log_probs",
            f"has {len(values)} entries for {sample.response_length} tokens",
        )
    if not all(math.isfinite(value) and value <= 1e-3 for value in values):
        raise _wrong(sample, "teacher_log_probs", "holds what is no log-probability")


def _check_tables(
    sample: Sample, request: TeacherRequest, scores: TeacherScores, with_student: bool
) -> None:
    of_student, of_teacher = request.selection.of_student, request.selection.of_teacher
    topk = sample.student_topk
    if of_student:
        _check_table(sample, "student_topk", topk, request.top_k)
    at_student = scores.teacher_at_student_topk
    _check_there(sample, "teacher_at_student_topk", at_student, of_student)
    if at_student is not None and topk is not None:
        _check_table(sample, "teacher_at_student_topk", at_student, request.top_k)
        if at_student.ids != topk.ids:
            raise _wrong(sample, "teacher_at_student_topk", "is of other tokens than student_topk")
    best = scores.teacher_topk
    _check_there(sample, "teacher_topk", best, of_teacher)
    if best is not None:
        _check_table(sample, "teacher_topk", best, request.top_k)
    at_teacher = scores.student_at_teacher_topk
    if at_teacher is None and not (with_student and request.needs_student):
        return
    _check_there(sample, "student_at_teacher_topk", at_teacher, request.needs_student)
    if at_teacher is not None and best is not None:
        _check_table(sample, "student_at_teacher_topk", at_teacher, request.top_k)
        if at_teacher.ids != best.ids:
            raise _wrong(sample, "student_at_teacher_topk", "is of other tokens than teacher_topk")


def _check_there(sample: Sample, name: str, table: TokenTable | None, is_wanted: bool) -> None:
    if (table is not None) != is_wanted:
        raise _wrong(sample, name, "is missing" if is_wanted else "was not asked for")


def _check_table(sample: Sample, name: str, table: TokenTable | None, width: int) -> None:
    if table is None:
        raise _wrong(sample, name, f"is missing; roll out with top_logprobs={width}")
    if (table.num_rows, table.width) != (sample.response_length, width):
        raise _wrong(
            sample,
            name,
            f"is [{table.num_rows}, {table.width}] instead of [{sample.response_length}, {width}]",
        )
    if not np.isfinite(table.score_array).all():
        raise _wrong(sample, name, "holds what is not finite")
    ordered = np.sort(table.id_array, axis=1)
    if width > 1 and (ordered[:, 1:] == ordered[:, :-1]).any():
        raise _wrong(sample, name, "holds a token twice at one position")


def _wrong(sample: Sample, field: str, what: str) -> ScoresMisalignedError:
    return ScoresMisalignedError(f"sample {sample.sample_id!r}: {field} {what}")
