"""The student as a trainer has it: transformers' Llama and AdamW, on a device with a budget.

Between two steps it holds nothing: a step loads the last checkpoint (weights, optimizer, number of
the step), and writes the next one. A trainer that is killed at any moment so goes on exactly where
its last whole checkpoint is.
"""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.distill.batch_tensors import BatchTensors, collate
from phalanx.distill.loss import DistillLoss, distill_loss
from phalanx.distill.sample import Sample
from phalanx.distill.training import Checkpoint

_STEP = re.compile(r"step-(\d+)$")
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class LearnerSettings:
    """`num_updates` of AdamW on each batch, whose gradients are summed over parts of `part_size`.

    Samples weigh 1 + `reward_weight` * (reward - the batch's mean). Only the uppermost
    `trained_layers` learn: those below, and the embeddings (which are also the head), are the
    teacher's already.
    """

    trained_layers: int = 12
    learning_rate: float = 1e-4
    num_updates: int = 3
    part_size: int = 4
    reward_weight: float = 0.5
    max_gradient_norm: float = 1.0
    num_threads: int = 1
    kept_checkpoints: int = 2


@dataclass(frozen=True)
class _Loaded:
    """What is in memory during a step."""

    step: int
    model: transformers.LlamaForCausalLM
    optimizer: torch.optim.AdamW
    trained: list[Tensor]


class Learner:
    """The trainer's side of the loop; `start` is the student's first checkpoint, of step 0."""

    def __init__(
        self,
        start: Path,
        folder: Path,
        settings: LearnerSettings,
        devices: Sequence[SimulatedDevice] = (),
    ) -> None:
        self._start = start
        self._folder = folder
        self._settings = settings
        self._devices = tuple(devices)
        self._loaded: _Loaded | None = None
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(settings.num_threads)
        torch.use_deterministic_algorithms(True)
        transformers.utils.logging.disable_progress_bar()

    def last(self) -> Checkpoint:
        """The last whole checkpoint."""
        return self._checkpoint(max(self._steps(), default=0))

    def load(self) -> None:
        """Take memory for the last checkpoint and all that a step needs beside it."""
        if self._loaded is not None:
            return
        settings = self._settings
        step, directory = self.last().step, self.last().path
        self._take("weights", (directory / "model.safetensors").stat().st_size)
        model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        trained = _trained(model, settings.trained_layers)
        num_bytes = sum(one.numel() for one in trained) * _FLOAT_BYTES
        self._take("gradients", num_bytes)
        self._take("optimizer", 2 * num_bytes)
        optimizer = torch.optim.AdamW(
            trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        if step:
            state = torch.load(directory / "optimizer.pt", weights_only=True)
            optimizer.load_state_dict(state)
        self._loaded = _Loaded(step, model, optimizer, trained)

    def train(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """One step; what the batch was worth before it."""
        loaded = self._in_memory()
        if step != loaded.step:
            raise RuntimeError(f"step {step} is to be trained, and step {loaded.step} is loaded")
        batch = collate(samples)
        self._take("activations", self._activation_bytes(loaded.model, batch))
        means = batch.rewards.mean()
        batch = batch.weighted(1 + self._settings.reward_weight * (batch.rewards - means))
        metrics: dict[str, float] = {}
        for _ in range(self._settings.num_updates):
            loaded.optimizer.zero_grad()
            found = self._gradients(loaded.model, batch)
            norm = torch.nn.utils.clip_grad_norm_(loaded.trained, self._settings.max_gradient_norm)
            loaded.optimizer.step()
            metrics = metrics or {**found, "gradient_norm": float(norm), "reward": float(means)}
        return metrics

    def save(self, step: int) -> Checkpoint:
        """Write the checkpoint after so many steps; it is complete, or not there."""
        loaded = self._in_memory()
        saved = self._checkpoint(step)
        made = saved.path.with_name(f".{saved.path.name}.new")
        shutil.rmtree(made, ignore_errors=True)
        loaded.model.save_pretrained(made)
        torch.save(loaded.optimizer.state_dict(), made / "optimizer.pt")
        made.rename(saved.path)
        for old in sorted(self._steps())[: -self._settings.kept_checkpoints]:
            shutil.rmtree(self._checkpoint(old).path)
        return saved

    def offload(self) -> None:
        """Give all memory back. Any number of times."""
        self._loaded = None
        gc.collect()
        for device in self._devices:
            for tag in ("activations", "optimizer", "gradients", "weights"):
                device.give(tag)

    def _gradients(
        self, model: transformers.LlamaForCausalLM, batch: BatchTensors
    ) -> dict[str, float]:
        """Add up those of all parts, each for its share of the tokens."""
        sums = {"loss": 0.0, "reverse_kl": 0.0, "entropy": 0.0}
        for start in range(0, len(batch.input_ids), self._settings.part_size):
            part = batch.rows(start, start + self._settings.part_size)
            share = part.num_tokens / batch.num_tokens
            answer = model(input_ids=part.input_ids, attention_mask=part.attention_mask)
            found: DistillLoss = distill_loss(answer.logits, part)
            (found.loss * share).backward()
            for name, value in found.metrics().items():
                sums[name] += share * value
        return sums

    def _activation_bytes(self, model: transformers.LlamaForCausalLM, batch: BatchTensors) -> int:
        """About: logits three times (with their gradient), and what a layer keeps that learns."""
        config = model.config
        tokens = self._settings.part_size * batch.input_ids.shape[1]
        layer = 12 * config.hidden_size + 4 * config.intermediate_size
        layers = min(self._settings.trained_layers, config.num_hidden_layers)
        return tokens * _FLOAT_BYTES * (3 * config.vocab_size + layers * layer)

    def _take(self, tag: str, num_bytes: int) -> None:
        for device in self._devices:
            device.take(tag, -(-num_bytes // len(self._devices)))

    def _in_memory(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("the learner is not loaded; call load first")
        return self._loaded

    def _checkpoint(self, step: int) -> Checkpoint:
        path = self._start if step == 0 else self._folder / f"step-{step:04d}"
        return Checkpoint(step, path.absolute(), str(step))

    def _steps(self) -> list[int]:
        found = (_STEP.match(path.name) for path in self._folder.iterdir())
        return [int(match[1]) for match in found if match]


def _trained(model: transformers.LlamaForCausalLM, num_layers: int) -> list[Tensor]:
    """The parameters that learn; the others need no gradient."""
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    for layer in model.model.layers[-num_layers:]:
        layer.requires_grad_(True)
    model.train()
    return [one for one in model.parameters() if one.requires_grad]


def own_devices() -> tuple[SimulatedDevice, ...]:
    """Those that this process was given, if any."""
    return DeviceLedger.from_environment("trainer")
