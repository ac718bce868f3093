"""The steps that processor files may name."""

from __future__ import annotations

from phalanx.errors import CheckpointError
from phalanx.processing.policy import (
    batch,
    clean_prompt,
    device,
    newline_prompt,
    normalizer,
    relative,
    rename,
    state_prompt,
    tokenization,
)
from phalanx.processing.policy.disabled import DisabledStep
from phalanx.processing.policy.step import MakeStep, ProcessorStep, StepRecord, Surroundings

STEPS: dict[str, MakeStep] = {
    rename.NAME: rename.RenameObservations.read,
    batch.NAME: batch.AddBatch.read,
    relative.RELATIVE: relative.RelativeActions.read,
    relative.ABSOLUTE: relative.AbsoluteActions.read,
    normalizer.NORMALIZER: normalizer.Normalizer.read,
    normalizer.UNNORMALIZER: normalizer.Unnormalizer.read,
    clean_prompt.NAME: clean_prompt.CleanPrompt.read,
    state_prompt.NAME: state_prompt.StatePrompt.read,
    tokenization.NAME: tokenization.Tokenization.read,
    device.NAME: device.MoveToDevice.read,
    **{name: newline_prompt.NewlinePrompt.read for name in newline_prompt.NAMES},
}


def make_step(record: StepRecord, surroundings: Surroundings) -> ProcessorStep:
    """The step of one entry. Raises `CheckpointError` by name for one that is not known here."""
    if (make := STEPS.get(record.registry_name)) is not None:
        return make(record, surroundings)
    if record.config.get("enabled") is False:
        return DisabledStep(record)
    raise CheckpointError(
        f"{record.where}: the step {record.registry_name!r} is not known here, and leaving it out "
        f"would change what the policy sees; known: {', '.join(sorted(STEPS))}. A step with "
        '"enabled": false is passed over'
    )
