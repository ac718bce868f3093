"""Samples and settings that the tests of this folder share."""

from __future__ import annotations

import msgspec
import numpy as np

from phalanx.distill import (
    AskingSettings,
    Prompt,
    RolloutSettings,
    Sample,
    TeacherRequest,
    TokenSelection,
    TokenTable,
)
from tests.distill.toy_role import VOCABULARY, log_probs

FAST = AskingSettings(max_concurrency=4, timeout_s=20, ready_timeout_s=20)
ALL = list(TokenSelection)


def asked(selection: TokenSelection, top_k: int = 3, **changes: object) -> TeacherRequest:
    k = 0 if selection is TokenSelection.STUDENT_SAMPLED else top_k
    return TeacherRequest(selection=selection, top_k=k, **changes)


def prompts(count: int = 2, **changes: object) -> list[Prompt]:
    return [Prompt(f"g{at}", (3 + at, 5, 7 + at), **changes) for at in range(count)]


def rollout(**changes: object) -> RolloutSettings:
    given = {"num_samples": 2, "max_new_tokens": 6, "asking": FAST, **changes}
    return RolloutSettings(**given)


def sample(
    group: int = 0,
    index: int = 0,
    *,
    length: int = 4,
    selection: TokenSelection = TokenSelection.STUDENT_SAMPLED,
    top_k: int = 3,
    student: str = "student",
    **changes: object,
) -> Sample:
    """As the toy student made it."""
    prompt = [3 + group, 5, 7 + group]
    random = np.random.default_rng([group, index])
    ids: list[int] = []
    values, top_ids, top_values = [], [], []
    for _ in range(length):
        scores = log_probs(student, prompt + ids)
        best = np.argsort(-scores)[:top_k]
        top_ids.append(best)
        top_values.append(scores[best])
        token = int(random.integers(1, VOCABULARY))
        values.append(float(scores[token]))
        ids.append(token)
    made = Sample(
        sample_id=f"g{group}/{index}",
        group_id=f"g{group}",
        index=index,
        prompt_ids=tuple(prompt),
        response_ids=tuple(ids),
        rollout_log_probs=tuple(values),
        weight_versions=(("1", length),) if length else (),
        student_topk=TokenTable.of(top_ids, top_values, top_k) if selection.of_student else None,
        teacher=asked(selection, top_k),
    )
    return msgspec.structs.replace(made, **changes)


def samples(groups: int = 2, each: int = 2, **changes: object) -> list[Sample]:
    return [sample(group, at, **changes) for group in range(groups) for at in range(each)]
