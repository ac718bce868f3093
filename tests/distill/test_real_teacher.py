"""A real student and a real teacher behind real servers, against a plain forward of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.client import AsyncRoleClient
from phalanx.distill import (
    DeferredBatch,
    MemoryStore,
    Prompt,
    RolloutSettings,
    RolloutWorkload,
    Sample,
    ScorerSettings,
    Scoring,
    StudentScorer,
    TeacherRequest,
    TeacherScorer,
    TokenSelection,
)
from phalanx.distill.batch_tensors import collate
from phalanx.distill.loss import LossSettings, Renormalization, distill_loss, log_probs_at
from phalanx.distill.prefill import ChosenIds
from phalanx.testing.tiny_llama import write_tiny_llama
from tests.distill.making import ALL
from tests.server.running import RunningServer
from tests.server.test_real_model import serving_model

TOLERANCE = 1e-4
TOP_K = 4
STUDENT, TEACHER = 1, 2


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {seed: tmp_path_factory.mktemp(f"model{seed}") for seed in (STUDENT, TEACHER)}
    return {seed: write_tiny_llama(path, seed) for seed, path in made.items()}


@pytest.fixture(scope="module")
def servers(directories: dict[int, Path]) -> Iterator[dict[int, RunningServer]]:
    options = {"pool_tokens": 2048, "max_batch_size": 4}
    with (
        serving_model(directories[STUDENT], **options) as student,
        serving_model(directories[TEACHER], **options) as teacher,
    ):
        yield {STUDENT: student, TEACHER: teacher}


def forward(directory: Path, one: Sample) -> torch.Tensor:
    """Log-probabilities [response, vocabulary] of a plain forward, in float32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
    with torch.inference_mode():
        logits = model(ids).logits[0]
    return logits[len(one.prompt_ids) - 1 : -1].log_softmax(-1)


def prompts(selection: TokenSelection) -> list[Prompt]:
    k = 0 if selection is TokenSelection.STUDENT_SAMPLED else TOP_K
    request = TeacherRequest(selection=selection, top_k=k)
    texts = ["Once upon a time", "The sea is"]
    return [Prompt(f"g{at}", text=text, teacher=request) for at, text in enumerate(texts)]


async def distilled(servers, selection, chosen=ChosenIds.AUTO) -> DeferredBatch:
    async with (
        AsyncRoleClient(servers[STUDENT].url) as student,
        AsyncRoleClient(servers[TEACHER].url) as teacher,
    ):
        settings = RolloutSettings(
            num_samples=2,
            max_new_tokens=9,
            top_logprobs=TOP_K,
            seed=3,
            sampling={"ignore_eos": True},
        )
        needs = (Scoring.TEACHER, Scoring.STUDENT)
        batch = await DeferredBatch.open(MemoryStore(), "s1", needs)
        await batch.collect(RolloutWorkload(student, settings), prompts(selection))
        await batch.score_teacher(TeacherScorer(teacher, ScorerSettings(chosen=chosen)))
        await batch.score_student(StudentScorer(student))
        await batch.validate()
        await batch.publish()
        return batch


def at(full: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    return full.gather(1, torch.from_numpy(ids.astype(np.int64))).numpy()


@pytest.mark.parametrize("selection", ALL)
def test_complaint_slime_714_teacher_logprobs_are_those_of_a_plain_forward(
    servers, directories, selection
):
    """And the student's, when it sampled and when it was scored again; within 1e-4."""
    batch = asyncio.run(distilled(servers, selection))
    for one in batch.samples:
        teacher = forward(directories[TEACHER], one)
        student = forward(directories[STUDENT], one)
        own = np.array(one.response_ids)[:, None]
        close = {"rtol": 0, "atol": TOLERANCE}
        np.testing.assert_allclose(one.scores.teacher_log_probs, at(teacher, own)[:, 0], **close)
        np.testing.assert_allclose(one.rollout_log_probs, at(student, own)[:, 0], **close)
        support = one.scores.support
        if support is None:
            continue
        valid = np.arange(support.width) < support.size_array[:, None]
        ids = support.id_array
        np.testing.assert_allclose(support.teacher_array[valid], at(teacher, ids)[valid], **close)
        np.testing.assert_allclose(support.student_array[valid], at(student, ids)[valid], **close)


@pytest.mark.parametrize("chosen", [ChosenIds.BY_POSITION, ChosenIds.UNION])
def test_both_ways_to_choose_tokens_say_the_same(servers, chosen):
    by_auto = asyncio.run(distilled(servers, TokenSelection.UNION))
    by_other = asyncio.run(distilled(servers, TokenSelection.UNION, chosen))
    for one, other in zip(by_auto.samples, by_other.samples, strict=True):
        assert one.response_ids == other.response_ids
        np.testing.assert_allclose(
            one.scores.support.teacher_array, other.scores.support.teacher_array, rtol=0, atol=1e-5
        )


def test_i101_the_loss_of_the_written_back_outputs_is_that_of_two_models(servers, directories):
    """Over the whole support and its gradient, against both models forwarded side by side."""
    from transformers import LlamaForCausalLM

    batch = asyncio.run(distilled(servers, TokenSelection.UNION))
    tensors = collate(batch.samples)
    models = {
        seed: LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        for seed, path in directories.items()
    }
    logits = models[STUDENT](tensors.input_ids, attention_mask=tensors.attention_mask).logits
    found = distill_loss(logits, tensors, LossSettings(renormalization=Renormalization.NONE))
    with torch.no_grad():
        other = models[TEACHER](tensors.input_ids, attention_mask=tensors.attention_mask).logits
    assert tensors.support_ids is not None and tensors.support_valid is not None
    p = log_probs_at(tensors.response_logits(logits), tensors.support_ids)
    q = log_probs_at(tensors.response_logits(other), tensors.support_ids)
    terms = torch.where(tensors.support_valid, p.exp() * (p - q), 0.0).sum(-1)
    expected = (terms * tensors.mask).sum() / tensors.mask.sum()
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, logits, retain_graph=True) for one in (found.loss, expected)),
        rtol=1e-3,
        atol=1e-6,
    )
    assert found.reverse_kl > 0
