"""What the student is asked, and how its answers are graded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import AutoTokenizer

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


def prompts(checkpoint: str) -> list[Prompt]:
    """The questions in the chat form of the student's own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
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
    """The first digit of what the judge says, from 0 to 1; 0 where it says none."""
    found = _GRADE.search(said)
    return int(found[0]) / BEST if found else 0.0
