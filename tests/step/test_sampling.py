"""Draws follow the distribution that a naive filter gives, and depend on seed and offset alone."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.step.resources.sampling import RowFilter, draw, uniform

VOCAB = 12
LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.4, 3.0, -4.0, 1.0, 0.0, 2.5, -2.0, 0.1, 1.5])
FILTERS = {
    "plain": RowFilter(1.0),
    "cold": RowFilter(0.5),
    "hot": RowFilter(2.0),
    "top_k": RowFilter(1.0, top_k=4),
    "top_k beyond the vocabulary": RowFilter(1.0, top_k=500),
    "top_p": RowFilter(1.0, top_p=0.7),
    "top_p small": RowFilter(1.0, top_p=0.01),
    "min_p": RowFilter(1.0, min_p=0.2),
    "top_k and top_p": RowFilter(0.8, top_k=5, top_p=0.8),
    "all": RowFilter(1.3, top_k=7, top_p=0.9, min_p=0.15),
}


def reference(logits: torch.Tensor, row: RowFilter) -> torch.Tensor:
    """The probabilities of all tokens, in the order of the filters that the module states."""
    probs = torch.softmax(logits.double() / row.temperature, -1)
    order = probs.argsort(descending=True)
    if row.top_k > 0:
        probs[order[row.top_k :]] = 0
        probs /= probs.sum()
    if row.top_p < 1.0:
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= row.top_p]] = 0
    probs[probs < row.min_p * probs.max()] = 0
    return probs / probs.sum()


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """The statistic over tokens that can be drawn, and its degrees of freedom."""
    possible = probs > 0
    assert not counts[~possible].any(), "a token was drawn that the filters exclude"
    expected = probs[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    return statistic, int(possible.sum()) - 1


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name):
    row, num_draws = FILTERS[name], 1500
    probs = reference(LOGITS, row)
    draws = [uniform(7, offset) for offset in range(num_draws)]
    tokens = draw(LOGITS.repeat(num_draws, 1), [row] * num_draws, draws)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    statistic, freedom = chi_square(counts, probs)
    # Four standard deviations of a chi-square variable.
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", FILTERS)
def test_evenly_spaced_draws_give_each_token_its_share(name):
    row, num_draws = FILTERS[name], 500
    draws = [(index + 0.5) / num_draws for index in range(num_draws)]
    tokens = draw(LOGITS.repeat(num_draws, 1), [row] * num_draws, draws)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert (counts - reference(LOGITS, row) * num_draws).abs().max() <= 1.0


def test_all_that_top_k_keeps_counts_for_top_p_though_min_p_cuts_earlier():
    size = 5000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 0.1
    ranked = logits.softmax(-1).sort(descending=True).values
    row = RowFilter(1.0, top_k=2000, top_p=0.95, min_p=float(ranked[1019] / ranked[0]))
    last = draw(logits[None], [row], [1.0 - 1e-9])
    rank = int((logits > logits[last]).sum())
    assert 1015 <= rank <= 1020, "not 0.95 of the first 1024"


def test_a_large_vocabulary_is_filtered_as_a_small_one():
    """Nucleus sampling beyond the tokens that are tried first."""
    size = 5000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 0.1
    for row in (
        RowFilter(1.0, top_p=0.9),
        RowFilter(1.0, top_k=3000, top_p=0.95),
        RowFilter(1.0, top_k=2000),
        RowFilter(1.0, min_p=0.5),
        RowFilter(1.0, top_p=0.05),
        RowFilter(1.0, top_p=0.05, min_p=0.9),
    ):
        probs = reference(logits, row)
        draws = [(index + 0.5) / 40 for index in range(40)]
        tokens = draw(logits.expand(40, size), [row] * 40, draws)
        assert bool((probs[tokens] > 0).all())
        order = logits.argsort(descending=True, stable=True)
        if row.filtered:
            cumulative = probs[order].cumsum(0)
            ranks = torch.tensor([int((order == token).nonzero()) for token in tokens])
            expected = torch.searchsorted(cumulative, torch.tensor(draws).double())
            assert (ranks - expected).abs().max() <= 1, "float32 sums may move a border by one"


def test_greedy_takes_the_most_likely_token():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    for row in (RowFilter(0.0), RowFilter(0.7, top_k=1), RowFilter(0.0, top_p=0.3, min_p=0.5)):
        assert draw(logits, [row, row], [0.99, 0.99]).tolist() == [4, 7]


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_tiny_temperatures_are_greedy(temperature, filters):
    row = RowFilter(temperature, **filters)
    assert draw(LOGITS[None] * 30, [row], [0.5]).tolist() == [4]


def test_a_row_is_drawn_alike_whatever_is_beside_it():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 300, generator=generator) * 3
    rows = [*FILTERS.values()][:9]
    rows[4] = RowFilter(0.0)
    for offset in range(20):
        draws = [uniform(seed, offset) for seed in range(9)]
        together = draw(logits, rows, draws).tolist()
        alone = [int(draw(logits[i : i + 1], [rows[i]], [draws[i]])) for i in range(len(rows))]
        assert together == alone


def test_the_draw_next_to_one_takes_a_token_that_exists():
    last = 1.0 - 2.0**-53
    for row in (RowFilter(1.0), RowFilter(1.0, top_k=3), RowFilter(1.0, top_p=0.5)):
        token = int(draw(LOGITS[None], [row], [last]))
        assert reference(LOGITS, row)[token] > 0
    forbidden = LOGITS.clone()
    forbidden[-1] = -math.inf
    assert int(draw(forbidden[None], [RowFilter(1.0)], [last])) != VOCAB - 1


def test_half_precision_logits_are_drawn_in_float32():
    rows = [RowFilter(1.0), RowFilter(0.9, top_p=0.9)]
    logits = torch.stack([LOGITS, LOGITS])
    draws = [0.4, 0.8]
    assert draw(logits.bfloat16(), rows, draws).equal(draw(logits.bfloat16().float(), rows, draws))


def test_uniform_is_a_fixed_function_of_seed_and_offset():
    assert uniform(0, 0) == uniform(0, 0)
    drawn = [uniform(seed, offset) for seed in range(40) for offset in range(40)]
    assert len(set(drawn)) == 1600
    assert all(0.0 <= value < 1.0 for value in drawn)
    counts = torch.histc(torch.tensor(drawn), bins=16, min=0, max=1).double()
    statistic, freedom = chi_square(counts, torch.full((16,), 1 / 16).double())
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom)


def test_uniform_takes_any_seed_of_64_bits():
    drawn = {uniform(seed, 3) for seed in (-(2**63), -1, 0, 1, 2**31, 2**63 - 1)}
    assert len(drawn) == 6


def test_neighbouring_seeds_and_offsets_are_unrelated():
    """Seed s at offset o + 1 must not be seed s + 1 at offset o, nor anything near it."""
    for shift in range(1, 4):
        first = torch.tensor([uniform(seed, 5) for seed in range(400)]).double()
        second = torch.tensor([uniform(seed + shift, 5 - shift) for seed in range(400)]).double()
        correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
        assert abs(float(correlation)) < 0.15
