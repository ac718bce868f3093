"""The loss of on-policy distillation: the reverse Kullback-Leibler divergence KL(student || teacher)
along the student's own responses.

At every position of a response the student's distribution p over the next token is held against the
teacher's q. The expectation is over responses of the student, so the same prefix is used for both
(Agarwal et al., "On-Policy Distillation of Language Models", 2023, equation 3; Gu et al., "MiniLLM",
2023, section 2.1). Gradients go through p only. All sums are in float32, whatever the logits are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.distill.batch_tensors import BatchTensors
from phalanx.errors import InvalidRequestError

_ROWS = 4096
"""Positions whose logits are turned to float32 at a time."""


class Estimator(enum.StrEnum):
    """How the divergence is estimated where only the sampled token x ~ p is known at a position.

    That x ~ p is for the rollout to see to: temperature 1, and no top_p, top_k or min_p. With
    r = log p(x) - log q(x), r_0 the same for the student that sampled, and no gradient through [..]:

    `policy_gradient`: [r_0] * p(x) / [p_0(x)], whose gradient at p = p_0 is that of the divergence,
    in expectation: E[r * grad log p(x)] (the score function; Williams, 1992; used token by token, a
    token's reward being -r_0 of that token alone). Its value is no divergence.
    `k1`: r. Right in expectation as a number, but the expectation of its gradient is 0: to be
    measured, not minimised.
    `k2`: r^2 / 2. Biased as a number; its gradient is r * grad log p(x), that of the divergence in
    expectation.
    `k3`: exp(-r) - 1 + r, never below 0 and right in expectation as a number; its gradient is in
    expectation that of the forward divergence KL(q || p).
    (Schulman, "Approximating KL Divergence", 2020, for the three as numbers.)
    """

    POLICY_GRADIENT = "policy_gradient"
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Renormalization(enum.StrEnum):
    """What a sum over some tokens S of the vocabulary does about all the others.

    `none`: the terms of S as they are, sum over S of p (log p - log q). Not below 0 only when S has
    all the mass.
    `support`: p and q are divided by their mass in S, so that both are distributions over S: a true
    divergence, which does not see how much mass lies outside.
    `tail`: one more token stands for everything outside of S, with the mass that is left of p and of
    q: a true divergence, and never above that over the whole vocabulary (data processing).
    """

    NONE = "none"
    SUPPORT = "support"
    TAIL = "tail"


@dataclass(frozen=True)
class LossSettings:
    """`clip_ratio` bounds p / p_0 of `policy_gradient` to [1 - clip, 1 + clip]; None leaves it.

    A log-probability of the teacher below `floor` counts as that: a teacher that rules a token out
    would make the divergence infinite. `per_sequence` takes the mean over each response first, so
    that long ones do not count for more.
    """

    estimator: Estimator = Estimator.POLICY_GRADIENT
    renormalization: Renormalization = Renormalization.TAIL
    clip_ratio: float | None = None
    floor: float = -100.0
    per_sequence: bool = False

    def __post_init__(self) -> None:
        if self.clip_ratio is not None and not 0 < self.clip_ratio < 1:
            raise InvalidRequestError(
                f"clip_ratio={self.clip_ratio} must be above 0 and below 1, or None for no bound",
                field="clip_ratio",
            )
        if not -1000 <= self.floor < 0:
            raise InvalidRequestError(
                f"floor={self.floor} must be a log-probability from -1000 to below 0", field="floor"
            )


@dataclass(frozen=True)
class DistillLoss:
    """`loss` is what to minimise, a scalar with a gradient. `reverse_kl` (a mean over tokens, without
    gradient) is the divergence as a number: exact over the support where there is one, else by k1 of
    the sampled tokens; `entropy` that of the sampled tokens, -log p.
    """

    loss: Tensor
    reverse_kl: Tensor
    entropy: Tensor
    per_token: Tensor
    """float32 [b, r], with a gradient; 0 where the mask is."""

    def metrics(self) -> dict[str, float]:
        """Numbers for a log."""
        return {
            "loss": float(self.loss.detach()),
            "reverse_kl": float(self.reverse_kl),
            "entropy": float(self.entropy),
        }


def distill_loss(
    logits: Tensor, batch: BatchTensors, settings: LossSettings | None = None
) -> DistillLoss:
    """The loss of a batch from a model's logits [b, l, vocabulary] over `batch.input_ids`.

    Over the support where the batch has one, else of the sampled tokens by `settings.estimator`.
    """
    settings = settings or LossSettings()
    if logits.shape[:2] != batch.input_ids.shape:
        raise InvalidRequestError(
            f"logits are {list(logits.shape)}; input_ids are {list(batch.input_ids.shape)}, and the"
            " model has to answer at each of their positions",
            field="logits",
        )
    wanted = batch.response_ids[..., None]
    if batch.support_ids is not None:
        wanted = torch.cat((wanted, batch.support_ids), dim=-1)
    _check_vocabulary(wanted, logits.shape[-1])
    found = log_probs_at(batch.response_logits(logits), wanted)
    sampled = found[..., 0]
    if batch.support_ids is None:
        per_token = sampled_divergence(
            sampled, batch.teacher_log_probs, batch.rollout_log_probs, settings
        )
        number = sampled.detach() - batch.teacher_log_probs.clamp(min=settings.floor)
    else:
        assert batch.support_teacher is not None and batch.support_valid is not None
        per_token = support_divergence(
            found[..., 1:], batch.support_teacher, batch.support_valid, settings
        )
        number = per_token.detach()
    per_token = torch.where(batch.mask != 0, per_token * batch.mask, 0.0)
    return DistillLoss(
        reduced(per_token, batch.mask, per_sequence=settings.per_sequence),
        plain_mean(number, batch.mask),
        plain_mean(-sampled.detach(), batch.mask),
        per_token,
    )


def log_probs_at(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of tokens `ids` [..., k] under `logits` [..., vocabulary]: float32 [..., k].

    log softmax(z)_i = z_i - logsumexp(z), in float32 and a part of the rows at a time, and the same
    again for the gradient, so that no copy of all logits is made.
    """
    rows, wanted = logits.flatten(0, -2), ids.flatten(0, -2)
    parts: list[Tensor] = []
    for start in range(0, max(len(rows), 1), _ROWS):
        part = slice(start, start + _ROWS)
        found = checkpoint(
            _part_at, rows[part], wanted[part], use_reentrant=False, preserve_rng_state=False
        )
        parts.append(found)
    return torch.cat(parts).reshape(ids.shape)


def _part_at(rows: Tensor, ids: Tensor) -> Tensor:
    rows = rows.float()
    return rows.gather(-1, ids) - torch.logsumexp(rows, dim=-1, keepdim=True)


def _check_vocabulary(ids: Tensor, size: int) -> None:
    """A device's own refusal of such an index names nothing, and ends all use of it."""
    largest = int(ids.max())
    if largest >= size:
        raise InvalidRequestError(
            f"the batch has token {largest}, and the model's logits are of {size} tokens; student,"
            " teacher and the model that is trained read the same ids; give them one tokenizer",
            field="logits",
        )


def sampled_divergence(
    student: Tensor, teacher: Tensor, rollout: Tensor, settings: LossSettings
) -> Tensor:
    """An estimate at each sampled token, from log-probabilities [b, r] of the student (with its
    gradient), of the teacher, and of the student that sampled. See `Estimator`.
    """
    student, teacher, rollout = student.float(), teacher.float(), rollout.float()
    teacher = teacher.clamp(min=settings.floor)
    gap = student - teacher
    match settings.estimator:
        case Estimator.POLICY_GRADIENT:
            reward = (teacher - rollout).detach()
            ratio = torch.exp(student - rollout)
            if settings.clip_ratio is None:
                return -reward * ratio
            low, high = 1 - settings.clip_ratio, 1 + settings.clip_ratio
            return torch.maximum(-reward * ratio, -reward * ratio.clamp(low, high))
        case Estimator.K1:
            return gap
        case Estimator.K2:
            return gap.square() / 2
        case Estimator.K3:
            return torch.expm1(-gap) + gap


def support_divergence(
    student: Tensor, teacher: Tensor, valid: Tensor, settings: LossSettings
) -> Tensor:
    """The divergence [b, r] over the tokens of a support, from log-probabilities [b, r, k] of student
    (with its gradient) and teacher. See `Renormalization`.
    """
    student = student.float()
    teacher = teacher.float().clamp(min=settings.floor)
    # Padding has no probability on either side, and no gradient; neither has what the student rules
    # out: p log p goes to 0 with p.
    p = torch.where(valid & (student > _NOTHING), student, _NOTHING)
    q = torch.where(valid, teacher, _NOTHING)
    if settings.renormalization is Renormalization.SUPPORT:
        p = p - torch.logsumexp(p, dim=-1, keepdim=True)
        q = q - torch.logsumexp(q, dim=-1, keepdim=True)
    terms = torch.where(valid, p.exp() * (p - q), 0.0).sum(dim=-1)
    if settings.renormalization is Renormalization.TAIL:
        p_tail, q_tail = _tail(p), _tail(q).clamp(min=settings.floor)
        terms = terms + p_tail.exp() * (p_tail - q_tail)
    return terms


_NOTHING = -1.0e4
"""exp of it is 0 in float32, and differences of it stay finite."""
_LEAST_TAIL = 1.0e-7
"""Less mass than that is rounding of float32."""


def _tail(log_probs: Tensor) -> Tensor:
    """The logarithm of the mass that is left: log(1 - sum exp), without a gradient at rounding."""
    left = 1 - log_probs.exp().sum(dim=-1)
    return left.clamp(min=_LEAST_TAIL).log()


def plain_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of [b, r] over the tokens that count, whatever their weights; 0 where none does."""
    return torch.where(mask != 0, values, 0.0).sum() / _total(mask)


def reduced(per_token: Tensor, mask: Tensor, *, per_sequence: bool) -> Tensor:
    """The mean of values that have their weights already, over tokens or over responses."""
    if not per_sequence:
        return per_token.sum() / _total(mask)
    lengths = (mask != 0).sum(dim=-1)
    means = per_token.sum(dim=-1) / lengths.clamp(min=1)
    return means.sum() / (lengths > 0).sum().clamp(min=1)


def _total(mask: Tensor) -> Tensor:
    """The number of tokens that count: weights do not divide themselves away."""
    return (mask != 0).sum().clamp(min=1)
