"""The loss against plain computations over the whole vocabulary, by autograd."""

from __future__ import annotations

import msgspec
import pytest
import torch

from phalanx.distill import TokenSelection
from phalanx.distill.batch_tensors import collate
from phalanx.distill.loss import (
    Estimator,
    LossSettings,
    Renormalization,
    distill_loss,
    log_probs_at,
    sampled_divergence,
    support_divergence,
)
from phalanx.distill.sample import TeacherScores, digest
from phalanx.distill.support import support_of
from phalanx.distill.token_table import TokenTable
from phalanx.errors import InvalidRequestError
from tests.distill.making import ALL, sample

VOCABULARY = 24
SAMPLED, STUDENT, TEACHER, UNION = ALL


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def full_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) at each position from logits, by the plain formula in float64."""
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def gradient(value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(value, of, retain_graph=True)
    return found


@pytest.mark.parametrize("renormalization", list(Renormalization))
def test_over_the_whole_vocabulary_every_choice_is_the_full_divergence(renormalization):
    student = random_logits(2, 3, VOCABULARY).requires_grad_()
    teacher = random_logits(2, 3, VOCABULARY, seed=1)
    ids = torch.arange(VOCABULARY).expand(2, 3, VOCABULARY)
    settings = LossSettings(renormalization=renormalization)
    valid = torch.ones_like(ids, dtype=torch.bool)
    found = support_divergence(
        log_probs_at(student, ids), log_probs_at(teacher, ids), valid, settings
    )
    expected = full_kl(student, teacher)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient(found.sum(), student), gradient(expected.sum(), student), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("renormalization", list(Renormalization))
def test_over_some_tokens_each_choice_is_what_it_says(renormalization):
    student = random_logits(2, 3, VOCABULARY).requires_grad_()
    teacher = random_logits(2, 3, VOCABULARY, seed=1)
    ids = student.detach().topk(5).indices
    settings = LossSettings(renormalization=renormalization)
    found = support_divergence(
        log_probs_at(student, ids),
        log_probs_at(teacher, ids),
        torch.ones_like(ids, dtype=torch.bool),
        settings,
    )
    p, q = student.softmax(-1).gather(-1, ids), teacher.softmax(-1).gather(-1, ids)
    match renormalization:
        case Renormalization.NONE:
            expected = (p * (p.log() - q.log())).sum(-1)
        case Renormalization.SUPPORT:
            p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
            expected = (p * (p.log() - q.log())).sum(-1)
        case Renormalization.TAIL:
            p = torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1)
            q = torch.cat((q, 1 - q.sum(-1, keepdim=True)), -1)
            expected = (p * (p.log() - q.log())).sum(-1)
            assert (expected <= full_kl(student, teacher)).all()
    if renormalization is not Renormalization.NONE:
        assert (found >= 0).all()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        gradient(found.sum(), student), gradient(expected.sum(), student), rtol=1e-3, atol=1e-5
    )


def expected_over_samples(settings: LossSettings, student, teacher, rollout):
    """The exact expectation over the token that is sampled from `rollout`, of the value and of the
    gradient of the estimate."""
    value, slope = 0.0, torch.zeros_like(student)
    q, p0 = teacher.log_softmax(-1), rollout.log_softmax(-1)
    for token in range(VOCABULARY):
        p = student.log_softmax(-1)[token]
        estimate = sampled_divergence(p, q[token], p0[token], settings)
        weight = p0[token].exp()
        value = value + weight * estimate.detach()
        slope = slope + weight * gradient(estimate, student)
    return value, slope


@pytest.mark.parametrize("estimator", list(Estimator))
def test_estimators_are_right_in_expectation_as_they_say(estimator):
    student = random_logits(VOCABULARY).requires_grad_()
    teacher = random_logits(VOCABULARY, seed=1)
    settings = LossSettings(estimator=estimator)
    value, slope = expected_over_samples(settings, student, teacher, student.detach())
    divergence = full_kl(student, teacher)
    exact = gradient(divergence, student)
    forward = gradient(
        (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(), student
    )
    if estimator in (Estimator.K1, Estimator.K3):
        torch.testing.assert_close(value.double(), divergence.detach(), rtol=1e-4, atol=1e-5)
    match estimator:
        case Estimator.POLICY_GRADIENT | Estimator.K2:
            torch.testing.assert_close(slope, exact, rtol=1e-4, atol=1e-5)
        case Estimator.K1:
            torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-5)
        case Estimator.K3:
            torch.testing.assert_close(slope, forward, rtol=1e-4, atol=1e-5)


def test_clipping_stops_what_went_far_already():
    """As in PPO: no gradient where the ratio has left the bounds in the reward's direction."""
    settings = LossSettings(clip_ratio=0.2)
    rollout, teacher = torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -2.0])
    student = torch.tensor([-0.5, -0.5]).requires_grad_()
    found = sampled_divergence(student, teacher, rollout, settings)
    slope = gradient(found.sum(), student)
    assert slope[0] == 0  # liked by the teacher, and 1.65 times as likely already
    assert slope[1] > 0  # disliked, and likelier than it was: pushed back
    near = torch.tensor([-0.95, -0.95]).requires_grad_()
    plain = sampled_divergence(near, teacher, rollout, LossSettings())
    clipped = sampled_divergence(near, teacher, rollout, settings)
    torch.testing.assert_close(clipped, plain)


def scored_sample(selection, teacher_logits, group=0, index=0, length=4):
    """A sample with the scores of given logits [length, vocabulary]."""
    one = sample(group, index, length=length, selection=selection)
    q = teacher_logits.log_softmax(-1).float()
    own = tuple(q[at, token].item() for at, token in enumerate(one.response_ids))
    best = at_student = None
    if selection.of_teacher:
        values, ids = q.topk(3)
        best = TokenTable.of(ids.numpy(), values.numpy(), 3)
    if selection.of_student:
        ids = torch.from_numpy(one.student_topk.id_array.copy()).long()
        at_student = TokenTable.of(ids.numpy(), q.gather(1, ids).numpy(), 3)
    scores = TeacherScores(
        asked=digest(one),
        model=None,
        version=None,
        teacher_log_probs=own,
        teacher_topk=best,
        teacher_at_student_topk=at_student,
        support=support_of(selection, one.student_topk, best, at_student, None),
    )
    return msgspec.structs.replace(one, scores=scores, reward=float(index))


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("selection", ALL)
def test_i101_a_whole_batch_is_the_mean_over_its_tokens(selection, per_sequence):
    """Padding, masks and supports of other sizes at every position; against a loop over tokens."""
    lengths = [4, 1, 6]
    teachers = [random_logits(length, VOCABULARY, seed=9 + length) for length in lengths]
    made = [
        scored_sample(selection, teachers[at], at, 0, length) for at, length in enumerate(lengths)
    ]
    batch = collate(made, pad_id=23)
    logits = random_logits(3, batch.input_ids.shape[1], VOCABULARY, seed=5).requires_grad_()
    settings = LossSettings(
        estimator=Estimator.K2,
        renormalization=Renormalization.SUPPORT,
        per_sequence=per_sequence,
    )
    found = distill_loss(logits, batch, settings)
    means, total = [], []
    for row, one in enumerate(made):
        values = []
        for at, token in enumerate(one.response_ids):
            p = logits[row, len(one.prompt_ids) - 1 + at].log_softmax(-1)
            q = teachers[row][at].log_softmax(-1)
            if selection is SAMPLED:
                values.append((p[token] - q[token]).square() / 2)
                continue
            of_student = one.student_topk.id_array.tolist()[at] if selection.of_student else []
            of_teacher = q.topk(3).indices.tolist() if selection.of_teacher else []
            ids = sorted({*of_student, *of_teacher})
            a, b = p[ids].log_softmax(-1), q[ids].log_softmax(-1)
            values.append((a.exp() * (a - b)).sum())
        means.append(torch.stack(values).mean())
        total += values
    expected = torch.stack(means if per_sequence else total).mean()
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        gradient(found.loss, logits), gradient(expected, logits), rtol=1e-3, atol=1e-5
    )
    assert batch.num_tokens == sum(lengths)
    assert found.metrics()["loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_weights_of_tokens_and_samples_scale_their_terms():
    made = [scored_sample(UNION, random_logits(4, VOCABULARY, seed=at), at) for at in range(2)]
    batch = collate(made)
    logits = random_logits(2, batch.input_ids.shape[1], VOCABULARY).requires_grad_()
    plain = distill_loss(logits, batch)
    weights = torch.tensor([2.0, 0.0])
    weighted = distill_loss(logits, batch.weighted(weights))
    torch.testing.assert_close(weighted.per_token[0], 2 * plain.per_token[0])
    torch.testing.assert_close(weighted.loss, 2 * plain.per_token[0].sum() / 4)
    assert (gradient(weighted.loss, logits)[1] == 0).all()
    by_token = torch.zeros(2, 4)
    by_token[1, 2] = 3.0
    one = distill_loss(logits, batch.weighted(by_token))
    torch.testing.assert_close(one.loss, 3 * plain.per_token[1, 2])
    with pytest.raises(InvalidRequestError, match="weights are"):
        batch.weighted(torch.ones(3))


@pytest.mark.parametrize("selection", ALL)
def test_bf16_logits_of_any_size_stay_finite_and_right(selection):
    """Against float64 of the same rounded logits, also where the models are all but certain."""
    teacher = random_logits(4, VOCABULARY, seed=3, scale=30.0)
    batch = collate([scored_sample(selection, teacher)])
    rough = random_logits(1, batch.input_ids.shape[1], VOCABULARY, seed=4, scale=30.0)
    logits = rough.to(torch.bfloat16).requires_grad_()
    settings = LossSettings(estimator=Estimator.K2)
    found = distill_loss(logits, batch, settings)
    found.loss.backward()
    assert torch.isfinite(found.loss) and torch.isfinite(logits.grad).all()
    exact = distill_loss(rough.to(torch.bfloat16).double(), batch, settings)
    torch.testing.assert_close(found.loss, exact.loss, rtol=1e-5, atol=1e-5)


def test_a_teacher_that_rules_a_token_out_is_bounded():
    student = torch.tensor([[-0.1, -3.0]]).requires_grad_()
    teacher = torch.tensor([[-3.0e38, -0.01]])
    valid = torch.ones_like(teacher, dtype=torch.bool)
    for renormalization in Renormalization:
        settings = LossSettings(renormalization=renormalization, floor=-50.0)
        found = support_divergence(student, teacher, valid, settings)
        assert 0 < found.item() < 60
        assert torch.isfinite(gradient(found.sum(), student)).all()
    one = sampled_divergence(student[0, 0], teacher[0, 0], student[0, 0].detach(), LossSettings())
    assert torch.isfinite(one)


def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient():
    teacher = random_logits(4, VOCABULARY, seed=3)
    for selection in (STUDENT, TEACHER, UNION):
        batch = collate([scored_sample(selection, teacher)])
        logits = torch.zeros(1, batch.input_ids.shape[1], VOCABULARY)
        logits[0, 2:6] = teacher.float()
        logits.requires_grad_()
        found = distill_loss(logits, batch)
        assert abs(found.loss.item()) < 1e-6
        assert gradient(found.loss, logits).abs().max() < 1e-6


def test_steps_down_the_gradient_bring_the_student_to_its_teacher():
    """Over the union, and by policy gradient with tokens drawn anew at each step."""
    teacher = random_logits(VOCABULARY, seed=1).float()
    for settings in (None, LossSettings(estimator=Estimator.POLICY_GRADIENT)):
        student = torch.zeros(VOCABULARY, requires_grad=True)
        generator = torch.Generator().manual_seed(0)
        first = full_kl(student, teacher).item()
        optimizer = torch.optim.Adam([student], lr=0.2)
        for _ in range(60):
            p = student.log_softmax(-1)
            if settings is None:
                ids = student.topk(8).indices
                loss = support_divergence(
                    p[ids][None],
                    teacher.log_softmax(-1)[ids][None],
                    torch.ones(1, 8, dtype=torch.bool),
                    LossSettings(),
                ).sum()
            else:
                ids = torch.multinomial(p.exp().detach(), 32, True, generator=generator)
                q = teacher.log_softmax(-1)[ids]
                loss = sampled_divergence(p[ids], q, p[ids].detach(), settings).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert full_kl(student, teacher).item() < first / 10


def test_what_does_not_fit_together_is_refused():
    teacher = random_logits(4, VOCABULARY)
    whole = scored_sample(UNION, teacher)
    with pytest.raises(InvalidRequestError, match="separate batches"):
        collate([whole, scored_sample(SAMPLED, teacher, 1)])
    with pytest.raises(InvalidRequestError, match="no teacher's scores"):
        collate([sample()])
    with pytest.raises(InvalidRequestError, match="no samples"):
        collate([])
    with pytest.raises(InvalidRequestError, match="logits are"):
        distill_loss(torch.zeros(1, 2, VOCABULARY), collate([whole]))


def test_rows_and_devices_of_a_batch():
    made = [scored_sample(UNION, random_logits(4, VOCABULARY, seed=at), at) for at in range(4)]
    batch = collate(made)
    logits = random_logits(4, batch.input_ids.shape[1], VOCABULARY)
    whole = distill_loss(logits, batch).loss
    parts = [distill_loss(logits[at : at + 2], batch.rows(at, at + 2)).loss for at in (0, 2)]
    torch.testing.assert_close(sum(parts) / 2, whole)
    assert batch.to("cpu").rewards.tolist() == [0.0] * 4
    assert TokenSelection("union") is UNION
