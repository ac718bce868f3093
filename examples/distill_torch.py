"""On-policy distillation in a plain torch loop of ten lines.

python examples/distill_torch.py                 with two tiny models, which it serves itself
python examples/distill_torch.py --model DIR --student-url URL --teacher-url URL

The student's server begins with the weights in DIR, a Hugging Face directory, and takes new ones from
directories (`phalanx serve --weight-source dynamic`); the teacher has the same tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch
from distill_servers import Served, tiny_models
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from phalanx.client import AsyncRoleClient
from phalanx.distill import (
    Checkpoint,
    DeferredBatch,
    DiskStore,
    EngineWeights,
    Prompt,
    RolloutSettings,
    RolloutWorkload,
    TeacherRequest,
    TeacherScorer,
    TokenSelection,
)
from phalanx.distill.batch_tensors import collate
from phalanx.distill.loss import distill_loss

TEXTS = ("Once upon a time", "The sea is", "A lighthouse", "In the morning")


def prompts(step: int) -> list[Prompt]:
    """Those of a step: which tokens are compared is said here."""
    asked = TeacherRequest(selection=TokenSelection.UNION, top_k=16)
    return [Prompt(f"{step}.{at}", text=text, teacher=asked) for at, text in enumerate(TEXTS)]


async def distil(served: Served, folder: Path, num_steps: int, learning_rate: float) -> list[float]:
    """Train, and return what the divergence was at each step."""
    model = LlamaForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    settings = RolloutSettings(num_samples=4, max_new_tokens=24, top_logprobs=16)
    divergences: list[float] = []
    async with (
        AsyncRoleClient(served.student_url) as student,
        AsyncRoleClient(served.teacher_url) as teacher,
        EngineWeights(served.student_url) as weights,
    ):
        workload, scorer = RolloutWorkload(student, settings), TeacherScorer(teacher)
        with DiskStore(folder / "samples") as store:
            for step in range(num_steps):
                batch = await DeferredBatch.open(store, f"step-{step}")
                await batch.collect(workload, prompts(step))
                await batch.score_teacher(scorer)
                await batch.validate()
                await batch.publish()
                tensors = collate(batch.samples)
                logits = model(tensors.input_ids, attention_mask=tensors.attention_mask).logits
                found = distill_loss(logits, tensors)
                found.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                path = folder / f"after-{step}"
                model.save_pretrained(path)
                await weights.push(Checkpoint(step + 1, path, str(step + 1)))
                await batch.consume()
                divergences.append(found.metrics()["reverse_kl"])
                print(
                    f"step {step}: KL(student || teacher) {divergences[-1]:.3f} a token", flush=True
                )
    return divergences


def main() -> None:
    parser = argparse.ArgumentParser(description="On-policy distillation in a plain torch loop.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--model", type=Path, help="the directory that the student began with")
    parser.add_argument("--student-url")
    parser.add_argument("--teacher-url")
    given = parser.parse_args()
    urls = (given.model, given.student_url, given.teacher_url)
    if any(urls) and not all(urls):
        parser.error("give --model, --student-url and --teacher-url together, or none of them")
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if all(urls):
            run = distil(Served(*urls), folder, given.steps, given.learning_rate)
            asyncio.run(run)
            return
        with tiny_models(folder / "models") as served:
            asyncio.run(distil(served, folder, given.steps, given.learning_rate))


if __name__ == "__main__":
    main()
