"""What the student is asked, and how its answers are graded."""

from __future__ import annotations

import re
from collections.abc import Sequence

import transformers

from phalanx.distill import Prompt, Sample, TeacherRequest, TokenSelection

TOP_K = 32
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "Why is the sky blue?",
)
BEST = 9
_GRADE = re.compile(r"\d")
_BLAME = re.compile(r"\b(not?|wrong|incorrect|nonsense|unclear)\b", re.IGNORECASE)
_NO_WORD = 0.5
"""What an answer is worth about which the judge, a small model, says nothing to the point."""


def prompts(checkpoint: str) -> list[Prompt]:
    """The questions in the chat form of the student's own tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    request = TeacherRequest(selection=TokenSelection.STUDENT_TOPK, top_k=TOP_K)
    return [
        Prompt(
            group_id=f"question-{number}",
            input_ids=tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}],
                    add_generation_prompt=True,
                    return_dict=False,
                )
            ),
            metadata={"question": question},
            teacher=request,
        )
        for number, question in enumerate(QUESTIONS)
    ]


def judges_messages(sample: Sample) -> Sequence[dict[str, object]]:
    """The conversation in which the judge gives its grade."""
    asked = (
        f"Question: {sample.metadata['question']}\nAnswer: {sample.text.strip()}\n"
        f"How good is this answer? Reply with one number from 0 (nonsense) to {BEST} (perfect)."
    )
    return [{"role": "user", "content": asked}]


def reward(said: str, sample: Sample) -> float:
    """From 0 to 1: the first digit of what the judge says; without any, 0 where it blames."""
    grade = _GRADE.search(said)
    if grade:
        return int(grade[0]) / BEST
    return 0.0 if _BLAME.search(said) else _NO_WORD
