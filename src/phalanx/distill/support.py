"""Puts a sample's outputs together: the tokens over which its loss is summed, and what student and
teacher say of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.distill.sample import Sample, TokenSelection
from phalanx.distill.token_table import IdArray, ScoreArray, SupportTable, TokenTable
from phalanx.errors import ScoresMisalignedError

_CELLS = 1 << 22
"""Comparisons of ids that are kept at a time."""


def support_of(
    selection: TokenSelection,
    student_topk: TokenTable | None,
    teacher_topk: TokenTable | None,
    teacher_at_student: TokenTable | None,
    student_at_teacher: TokenTable | None,
) -> SupportTable | None:
    """The support of `selection`; None for the sampled tokens alone, which are the response itself.

    A row of `union` has the student's tokens first, then those of the teacher that are not among
    them. The tables belong together as `TeacherScores` has them.
    """
    match selection:
        case TokenSelection.STUDENT_SAMPLED:
            return None
        case TokenSelection.STUDENT_TOPK:
            assert student_topk is not None and teacher_at_student is not None
            return _whole(student_topk.id_array, student_topk, teacher_at_student)
        case TokenSelection.TEACHER_TOPK:
            assert teacher_topk is not None
            return _whole(teacher_topk.id_array, student_at_teacher, teacher_topk)
        case TokenSelection.UNION:
            assert student_topk is not None and teacher_topk is not None
            assert teacher_at_student is not None
            return _union(student_topk, teacher_topk, teacher_at_student, student_at_teacher)


def fields_of(sample: Sample) -> dict[str, IdArray | ScoreArray]:
    """The outputs of a scored sample as arrays, under the names that trainers know them by."""
    scores = sample.scores
    if scores is None:
        raise ScoresMisalignedError(f"sample {sample.sample_id!r} has no teacher's scores")
    fields: dict[str, IdArray | ScoreArray] = {
        "teacher_log_probs": np.asarray(scores.teacher_log_probs, dtype=np.float32)
    }
    if scores.teacher_topk is not None:
        fields["teacher_topk_token_ids"] = scores.teacher_topk.id_array
        fields["teacher_topk_log_probs"] = scores.teacher_topk.score_array
    if scores.teacher_at_student_topk is not None:
        fields["teacher_at_student_topk_log_probs"] = scores.teacher_at_student_topk.score_array
    if scores.student_at_teacher_topk is not None:
        fields["student_at_teacher_topk_log_probs"] = scores.student_at_teacher_topk.score_array
    support = scores.support
    if support is not None:
        fields["opd_topk_token_ids"] = support.id_array
        fields["opd_topk_teacher_log_probs"] = support.teacher_array
        fields["opd_topk_ksz"] = support.size_array
        if support.student_array is not None:
            fields["opd_topk_student_log_probs"] = support.student_array
    return fields


def _whole(ids: IdArray, student: TokenTable | None, teacher: TokenTable) -> SupportTable:
    return SupportTable.of_arrays(
        ids,
        None if student is None else student.score_array,
        teacher.score_array,
        np.full(len(ids), ids.shape[1], np.int32),
    )


def _union(
    student_topk: TokenTable,
    teacher_topk: TokenTable,
    teacher_at_student: TokenTable,
    student_at_teacher: TokenTable | None,
) -> SupportTable:
    firsts, seconds = student_topk.id_array, teacher_topk.id_array
    fresh = _fresh(firsts, seconds)
    sizes = firsts.shape[1] + fresh.sum(axis=1)
    rows, width = len(firsts), int(sizes.max(initial=firsts.shape[1]))
    ids = np.zeros((rows, width), np.int32)
    student = np.zeros((rows, width), np.float32)
    teacher = np.zeros((rows, width), np.float32)
    num_first = firsts.shape[1]
    ids[:, :num_first] = firsts
    student[:, :num_first] = student_topk.score_array
    teacher[:, :num_first] = teacher_at_student.score_array
    row, column = np.nonzero(fresh)
    place = num_first + (np.cumsum(fresh, axis=1) - 1)[row, column]
    ids[row, place] = seconds[row, column]
    teacher[row, place] = teacher_topk.score_array[row, column]
    if student_at_teacher is not None:
        student[row, place] = student_at_teacher.score_array[row, column]
    is_scored = student_at_teacher is not None
    return SupportTable.of_arrays(
        ids, student if is_scored else None, teacher, sizes.astype(np.int32)
    )


def _fresh(firsts: IdArray, seconds: IdArray) -> NDArray[np.bool_]:
    """Where `seconds` [rows, k] holds a token that its row of `firsts` does not."""
    fresh = np.empty(seconds.shape, np.bool_)
    # A part at a time: each row is compared all with all.
    step = max(1, _CELLS // (firsts.shape[1] * seconds.shape[1]))
    for start in range(0, len(firsts), step):
        part = slice(start, start + step)
        fresh[part] = ~(seconds[part, :, None] == firsts[part, None, :]).any(axis=2)
    return fresh
