"""On-policy distillation with TRL's trainer: its optimizer, schedule, accumulation and logging, and a
loss of published batches in place of its own.

python examples/distill_trl.py        with two tiny models, which it serves itself

TRL is installed with `pip install trl`, or as `python scripts/peer_env.py trl` does.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from distill_servers import Served, tiny_models
from distill_torch import prompts
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

try:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f"this example needs TRL ({error}); install it with `pip install trl`")

from phalanx.client import AsyncRoleClient
from phalanx.distill import (
    Checkpoint,
    DeferredBatch,
    EngineWeights,
    MemoryStore,
    RolloutSettings,
    RolloutWorkload,
    Sample,
    TeacherScorer,
)
from phalanx.distill.batch_tensors import BatchTensors, collate
from phalanx.distill.loss import distill_loss


class DistillTrainer(SFTTrainer):
    """TRL's trainer with the reverse Kullback-Leibler divergence to a teacher as its loss."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        batch = BatchTensors(**inputs)
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = distill_loss(logits, batch).loss
        return (loss, {"logits": logits}) if return_outputs else loss


class Rows:
    """Makes tensors of the samples that a row of the data set names."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def __call__(self, rows: Sequence[Mapping[str, int]]) -> dict[str, Tensor]:
        batch = collate([self._samples[row["sample"]] for row in rows])
        tensors = {one.name: getattr(batch, one.name) for one in dataclasses.fields(batch)}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def train(trainer_parts: dict[str, object], samples: Sequence[Sample], output: Path) -> float:
    """One step from one batch, in parts; its mean loss."""
    config = SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=len(samples) // 8,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        remove_unused_columns=False,
        activation_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = DistillTrainer(
        args=config,
        train_dataset=Dataset.from_dict({"sample": list(range(len(samples)))}),
        data_collator=Rows(samples),
        **trainer_parts,
    )
    return float(trainer.train().training_loss)


async def distil(served: Served, folder: Path, num_steps: int) -> None:
    model = LlamaForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    parts = {
        "model": model,
        "optimizers": (optimizer, None),
        "processing_class": AutoTokenizer.from_pretrained(served.model),
    }
    settings = RolloutSettings(num_samples=4, max_new_tokens=24, top_logprobs=16)
    async with (
        AsyncRoleClient(served.student_url) as student,
        AsyncRoleClient(served.teacher_url) as teacher,
        EngineWeights(served.student_url) as weights,
    ):
        workload, scorer = RolloutWorkload(student, settings), TeacherScorer(teacher)
        store = MemoryStore()
        for step in range(num_steps):
            batch = await DeferredBatch.open(store, f"step-{step}")
            await batch.collect(workload, prompts(step))
            await batch.score_teacher(scorer)
            await batch.validate()
            await batch.publish()
            loss = train(parts, batch.samples, folder / "trl")
            path = folder / f"after-{step}"
            model.save_pretrained(path)
            await weights.push(Checkpoint(step + 1, path, str(step + 1)))
            await batch.consume()
            print(f"step {step}: loss {loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="On-policy distillation with TRL's trainer.")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        with tiny_models(folder / "models") as served:
            asyncio.run(distil(served, folder, given.steps))


if __name__ == "__main__":
    main()
