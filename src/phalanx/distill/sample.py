"""One answer of a student with what is known of it: who made it, what it is worth, and what a teacher
says of its tokens. Frozen; a step that adds something makes a copy.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence

import msgspec

from phalanx.distill.token_table import SupportTable, TokenTable
from phalanx.errors import InvalidRequestError

MetaValue = str | int | float | bool | None
Span = tuple[str, int]
"""A version of the weights, and how many tokens in a row it made."""
MAX_TOP_K = 256


class TokenSelection(enum.StrEnum):
    """At which tokens student and teacher are compared at each position of a response."""

    STUDENT_SAMPLED = "student_sampled"
    STUDENT_TOPK = "student_topk"
    TEACHER_TOPK = "teacher_topk"
    UNION = "union"

    @property
    def of_student(self) -> bool:
        """Whether the student's likeliest tokens are among them."""
        return self in (TokenSelection.STUDENT_TOPK, TokenSelection.UNION)

    @property
    def of_teacher(self) -> bool:
        """Whether the teacher's likeliest tokens are among them."""
        return self in (TokenSelection.TEACHER_TOPK, TokenSelection.UNION)


class TeacherRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a teacher will be asked about a sample.

    `model` or `route_key` choose the teacher, as in every request of a role. `prompt_ids` stand
    before the response in place of the sample's own, for a teacher that is told more than the
    student was. With `rescores_student` the student is scored at the teacher's likeliest tokens too.
    """

    selection: TokenSelection = TokenSelection.STUDENT_SAMPLED
    top_k: int = 0
    model: str | None = None
    route_key: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    rescores_student: bool = True

    def __post_init__(self) -> None:
        if self.selection is TokenSelection.STUDENT_SAMPLED:
            if self.top_k:
                raise InvalidRequestError(
                    f"top_k={self.top_k} with {self.selection}, which compares one token a position;"
                    " leave it out, or choose student_topk, teacher_topk or union",
                    field="top_k",
                )
        elif not 1 <= self.top_k <= MAX_TOP_K:
            raise InvalidRequestError(
                f"top_k={self.top_k} must be from 1 to {MAX_TOP_K} for {self.selection}",
                field="top_k",
            )
        if self.prompt_ids is not None:
            check_ids("prompt_ids", self.prompt_ids)
            if not self.prompt_ids:
                raise InvalidRequestError(
                    "prompt_ids is empty; leave it out for the sample's own", field="prompt_ids"
                )

    @property
    def needs_student(self) -> bool:
        """Whether the student has to be scored again, where the teacher's tokens are known."""
        return self.rescores_student and self.selection.of_teacher


class TeacherScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a `TeacherRequest`, for each token of the response.

    `asked` is the digest of the request and the sample's tokens, `version` that of the teacher's
    weights. The tables are those of the request's selection: the teacher's likeliest tokens, the
    teacher at the student's, the student at the teacher's. `support` is all of them together.
    """

    asked: str
    model: str | None
    version: str | None
    teacher_log_probs: tuple[float, ...]
    teacher_topk: TokenTable | None = None
    teacher_at_student_topk: TokenTable | None = None
    student_at_teacher_topk: TokenTable | None = None
    support: SupportTable | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `index`-th answer to the prompt of its group.

    `rollout_log_probs` are the student's, of each token when it was sampled, and `student_topk` its
    likeliest tokens there. `weight_versions` says which weights made which of the tokens.
    `finish_reason` is `stop`, `length`, or `abort` for one that was cut off.
    """

    sample_id: str
    group_id: str
    index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    weight_versions: tuple[Span, ...] = ()
    finish_reason: str = "stop"
    seed: int | None = None
    text: str | None = None
    student_topk: TokenTable | None = None
    reward: float | None = None
    verdict: str | None = None
    metadata: dict[str, MetaValue] = {}
    teacher: TeacherRequest | None = None
    scores: TeacherScores | None = None

    def __post_init__(self) -> None:
        for name in ("sample_id", "group_id"):
            if not getattr(self, name):
                raise InvalidRequestError(f"{name} is empty; give a name", field=name)
        if self.index < 0:
            raise InvalidRequestError(f"index={self.index} is below 0", field="index")
        check_ids("prompt_ids", self.prompt_ids)
        check_ids("response_ids", self.response_ids)
        if not self.prompt_ids:
            raise InvalidRequestError(
                f"sample {self.sample_id!r} has no prompt", field="prompt_ids"
            )
        length = len(self.response_ids)
        self._check_length("rollout_log_probs", len(self.rollout_log_probs), length)
        if self.student_topk is not None:
            self._check_length("student_topk", self.student_topk.num_rows, length)
        if self.weight_versions:
            made = sum(count for _, count in self.weight_versions)
            self._check_length("weight_versions", made, length)
        if not all(math.isfinite(one) for one in self.rollout_log_probs):
            raise InvalidRequestError(
                f"sample {self.sample_id!r} has a log-probability that is not finite",
                field="rollout_log_probs",
            )

    def _check_length(self, field: str, found: int, length: int) -> None:
        if found != length:
            raise InvalidRequestError(
                f"{field} of sample {self.sample_id!r} is for {found} tokens; its response has"
                f" {length}",
                field=field,
            )

    @property
    def response_length(self) -> int:
        return len(self.response_ids)

    @property
    def weight_version(self) -> str | None:
        """Of the last token; None where the server did not tell."""
        return self.weight_versions[-1][0] if self.weight_versions else None

    @property
    def teacher_prompt_ids(self) -> tuple[int, ...]:
        """What stands before the response when the teacher reads it."""
        request = self.teacher
        if request is None or request.prompt_ids is None:
            return self.prompt_ids
        return request.prompt_ids


def digest(sample: Sample) -> str:
    """Of everything on which the teacher's answer depends but its weights."""
    topk = None if sample.student_topk is None else sample.student_topk.ids
    asked = (sample.teacher, sample.prompt_ids, sample.response_ids, topk)
    return hashlib.sha256(msgspec.msgpack.encode(asked)).hexdigest()[:32]


def check_ids(field: str, ids: Sequence[int]) -> None:
    """Raise `InvalidRequestError` for what is no token id."""
    for one in ids:
        if type(one) is not int or not 0 <= one < 1 << 31:
            raise InvalidRequestError(
                f"{field} holds {one!r}; token ids are integers from 0 to 2147483647", field=field
            )
