"""The loss where a model rules tokens out, tokens do not fit together, or there are very many."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from phalanx.distill.batch_tensors import collate
from phalanx.distill.loss import (
    LossSettings,
    Renormalization,
    distill_loss,
    log_probs_at,
    support_divergence,
)
from phalanx.distill.stores.queue_rows import columns_of
from phalanx.distill.support import support_of
from phalanx.distill.token_table import TokenTable
from phalanx.errors import InvalidRequestError
from tests.distill.making import ALL
from tests.distill.test_loss import VOCABULARY, full_kl, gradient, random_logits, scored_sample

SAMPLED, UNION = ALL[0], ALL[3]


@pytest.mark.parametrize("renormalization", list(Renormalization))
def test_a_token_that_the_student_rules_out_adds_nothing(renormalization):
    """p log p goes to 0 with p."""
    settings = LossSettings(renormalization=renormalization)
    teacher = random_logits(VOCABULARY, seed=1)
    student = random_logits(VOCABULARY)
    student[[2, 7]] = -torch.inf
    student.requires_grad_()
    ids = torch.arange(VOCABULARY)
    valid = torch.ones_like(ids, dtype=torch.bool)
    found = support_divergence(
        log_probs_at(student[None], ids[None]),
        log_probs_at(teacher[None], ids[None]),
        valid[None],
        settings,
    )
    rest = student.detach().isfinite()
    p, q = student.detach().log_softmax(-1)[rest], teacher.log_softmax(-1)[rest]
    assert found.item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-4)
    slope = gradient(found.sum(), student)
    assert torch.isfinite(slope).all() and (slope[~rest] == 0).all()


def test_tokens_that_the_model_does_not_have_are_refused():
    batch = collate([scored_sample(UNION, random_logits(4, VOCABULARY))])
    with pytest.raises(InvalidRequestError, match=r"token \d+, .*4 tokens; .*one tokenizer"):
        distill_loss(torch.zeros(*batch.input_ids.shape, 4), batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip_ratio", -0.1), ("clip_ratio", 1.5), ("floor", 0.5), ("floor", float("nan"))],
)
def test_settings_that_cannot_be_meant_are_refused(field, value):
    with pytest.raises(InvalidRequestError, match=f"{field}={value}"):
        LossSettings(**{field: value})


def test_tokens_count_whatever_the_sign_of_their_weights():
    batch = collate([scored_sample(UNION, random_logits(4, VOCABULARY))])
    assert batch.weighted(torch.tensor([-1.0])).num_tokens == batch.num_tokens == 4


def test_no_copy_of_all_logits_is_kept_for_the_gradient():
    logits = torch.randn(64, 512).to(torch.bfloat16).requires_grad_()
    ids = torch.randint(512, (64, 3))
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = log_probs_at(logits, ids)
    assert not [one for one in kept if one.numel() >= logits.numel() and one.dtype != logits.dtype]
    exact = logits.detach().double().requires_grad_()
    expected = exact.log_softmax(-1).gather(-1, ids)
    slope = gradient(found.sum(), logits).double()
    torch.testing.assert_close(slope, gradient(expected.sum(), exact), rtol=1e-2, atol=1e-2)


def test_a_union_of_many_wide_rows_takes_little_memory():
    rows, width = 1024, 256
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((rows, 1024)), axis=1)[:, :width]
    first = TokenTable.of(ids, np.zeros((rows, width)), width)
    second = TokenTable.of(ids + 100, np.ones((rows, width)), width)
    tracemalloc.start()
    found = support_of(UNION, first, second, first, second)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert found is not None
    for row in (0, rows - 1):
        wanted = {*ids[row].tolist(), *(ids[row] + 100).tolist()}
        given = found.id_array[row, : found.size_array[row]].tolist()
        assert set(given) == wanted and len(given) == len(wanted)


def test_the_slope_is_that_of_differences_of_the_whole_divergence():
    """Over the whole vocabulary, by central differences in float64 of the plain formula."""
    student = random_logits(VOCABULARY).requires_grad_()
    teacher = random_logits(VOCABULARY, seed=1)
    ids = torch.arange(VOCABULARY)[None]
    valid = torch.ones_like(ids, dtype=torch.bool)
    found = support_divergence(
        log_probs_at(student[None], ids), log_probs_at(teacher[None], ids), valid, LossSettings()
    )
    slope = gradient(found.sum(), student)
    step = 1e-5 * torch.eye(VOCABULARY, dtype=torch.float64)
    base = student.detach()
    expected = (full_kl(base + step, teacher) - full_kl(base - step, teacher)) / 2e-5
    torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-5)


def test_columns_of_several_selections_do_not_go_together():
    """Rows of a column would be those of other samples."""
    teacher = random_logits(4, VOCABULARY)
    mixed = [scored_sample(UNION, teacher), scored_sample(SAMPLED, teacher, 1)]
    with pytest.raises(InvalidRequestError, match="1 of 2 samples have teacher_topk_token_ids"):
        columns_of(mixed)
    assert {one.shape[0] for one in columns_of(mixed[:1] * 3).values()} == {3}
