"""The sampler as a resource: settings a request, draws by (seed, offset), and what is remembered."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.penalties import Penalties, TokenHistory
from phalanx.step.resources.sampler import SamplerConfig, SamplerSpec, SamplerStep
from phalanx.step.resources.sampling import RowFilter, uniform
from tests.step.caches import context

VOCAB = 10
FLAT = torch.zeros(VOCAB)
RAMP = torch.arange(VOCAB, dtype=torch.float32) / 4
PLAIN = RowFilter(1.0)
GREEDY = RowFilter(0.0)


@pytest.fixture
def sampler():
    return SamplerSpec("sampler", frozenset({"node"}), VOCAB).build(BuildInfo(CpuBackend()))


def open_request(sampler, rid: str, row: RowFilter = PLAIN, seed: int = 1, **options) -> None:
    sampler.ingest_request(rid, SamplerConfig(row, seed, **options))


def step(sampler, logits: torch.Tensor, *rids: str, allowed=None) -> list[int]:
    """One whole step that samples a token of each request."""
    declared, ctx = SamplerStep(rids), context(*rids)
    assert sampler.admit(declared, ctx).ok
    sampler.begin(declared, ctx)
    rows = logits.expand(len(rids), VOCAB) if logits.dim() == 1 else logits
    tokens = sampler.sample(rows, allowed).tolist()
    sampler.commit(declared, ctx)
    return tokens


def adjusted(sampler, logits: torch.Tensor, *rids: str, allowed=None) -> torch.Tensor:
    """What the tokens would be drawn from."""
    sampler.begin(SamplerStep(rids), context(*rids))
    return sampler._adjusted(logits.expand(len(rids), VOCAB), allowed)


def test_greedy_and_drawn_rows_share_a_step(sampler):
    open_request(sampler, "greedy", GREEDY)
    open_request(sampler, "drawn", seed=11)
    greedy, drawn = step(sampler, FLAT + (RAMP == RAMP.max()) * 1e-3, "greedy", "drawn")
    assert greedy == VOCAB - 1
    assert drawn == int(uniform(11, 0) * VOCAB)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(sampler):
    open_request(sampler, "alone", seed=5)
    alone = [step(sampler, RAMP, "alone")[0] for _ in range(20)]
    open_request(sampler, "again", seed=5)
    for index in range(4):
        open_request(sampler, f"other {index}", RowFilter(0.5 + index, top_p=0.9), seed=index)
    together = []
    for turn in range(20):
        others = [f"other {index}" for index in range(turn % 5)]
        at = turn % (len(others) + 1)
        rids = [*others[:at], "again", *others[at:]]
        together.append(step(sampler, RAMP, *rids)[at])
    assert together == alone
    assert len(set(alone)) > 3


def test_other_seeds_and_other_offsets_draw_otherwise(sampler):
    tokens = {}
    for seed in range(4):
        open_request(sampler, str(seed), seed=seed)
        tokens[seed] = tuple(step(sampler, FLAT, str(seed))[0] for _ in range(12))
    assert len(set(tokens.values())) == 4
    assert all(len(set(drawn)) > 3 for drawn in tokens.values()), "draws do not repeat"


def test_a_request_added_again_with_its_history_goes_on_where_it_was(sampler):
    open_request(sampler, "whole", seed=9, penalties=Penalties(frequency=0.5))
    whole = [step(sampler, RAMP, "whole")[0] for _ in range(16)]
    for cut in (0, 1, 7, 15):
        sampler.remove_request("part")
        open_request(
            sampler, "part", seed=9, penalties=Penalties(frequency=0.5), output_ids=whole[:cut]
        )
        assert [step(sampler, RAMP, "part")[0] for _ in range(16 - cut)] == whole[cut:]


def test_a_second_ingest_changes_nothing(sampler):
    open_request(sampler, "once", seed=3)
    open_request(sampler, "twice", seed=3)
    once, twice = [], []
    for _ in range(8):
        once.append(step(sampler, FLAT, "once"))
        open_request(sampler, "twice", GREEDY, seed=99)
        twice.append(step(sampler, FLAT, "twice"))
    assert once == twice


def test_a_step_without_a_commit_draws_the_same_again(sampler):
    open_request(sampler, "a", seed=4, penalties=Penalties(presence=1.0))
    for _ in range(3):
        declared, ctx = SamplerStep(("a",)), context("a")
        sampler.begin(declared, ctx)
        tokens = sampler.sample(RAMP[None]).tolist()
        sampler.unadmit(declared, ctx)
    assert step(sampler, RAMP, "a") == tokens


def test_a_planned_step_that_samples_nothing_moves_nothing(sampler):
    open_request(sampler, "a", seed=4)
    open_request(sampler, "b", seed=4)
    declared = SamplerStep(("a",))
    sampler.begin(declared, context("a"))
    sampler.commit(declared, context("a"))
    step_without_rows = SamplerStep(())
    sampler.begin(step_without_rows, context())
    sampler.commit(step_without_rows, context())
    assert step(sampler, FLAT, "a") == step(sampler, FLAT, "b")


@pytest.mark.parametrize(
    ("penalties", "formula"),
    [
        (Penalties(frequency=0.7), lambda logits, count, seen: logits - 0.7 * count),
        (Penalties(presence=1.5), lambda logits, count, seen: logits - 1.5 * (count > 0)),
        (
            Penalties(repetition=1.6),
            lambda logits, count, seen: torch.where(
                seen, torch.where(logits > 0, logits / 1.6, logits * 1.6), logits
            ),
        ),
        (
            Penalties(frequency=-0.4, presence=0.3, repetition=0.5),
            lambda logits, count, seen: (
                torch.where(seen, torch.where(logits > 0, logits / 0.5, logits * 0.5), logits)
                + 0.4 * count
                - 0.3 * (count > 0)
            ),
        ),
    ],
    ids=["frequency", "presence", "repetition", "all"],
)
def test_penalties_follow_their_formulas(sampler, penalties, formula):
    logits = RAMP - 1.0
    prompt, outputs = [0, 1, 1, 9], [1, 8, 8, 3, 8]
    count = torch.tensor([0, 1, 0, 1, 0, 0, 0, 0, 3, 0]).float()
    seen = torch.tensor([token in prompt + outputs for token in range(VOCAB)])
    open_request(sampler, "a", GREEDY, penalties=penalties, prompt_ids=prompt, output_ids=outputs)
    open_request(sampler, "plain")
    result = adjusted(sampler, logits, "a", "plain")
    torch.testing.assert_close(result[0], formula(logits, count, seen))
    assert torch.equal(result[1], logits)


def test_penalties_count_tokens_as_they_are_drawn(sampler):
    open_request(sampler, "a", GREEDY, penalties=Penalties(frequency=0.6))
    logits = torch.full((VOCAB,), -10.0)
    logits[:2] = torch.tensor([1.0, 0.9])
    # 0: 1.0 | 1: 0.9 > 0.4 | 0: 0.4 > 0.3 | 1: 0.3 > -0.2 | ...
    assert [step(sampler, logits, "a")[0] for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    assert float(adjusted(sampler, logits, "a")[0, 0]) == pytest.approx(1.0 - 3 * 0.6)


def test_logits_are_left_as_they_are(sampler):
    open_request(
        sampler, "a", penalties=Penalties(frequency=0.5), logit_bias=((3, 5.0),), output_ids=[2]
    )
    logits = RAMP.clone()[None]
    allowed = torch.ones(1, VOCAB, dtype=torch.bool)
    allowed[0, 4] = False
    sampler.begin(SamplerStep(("a",)), context("a"))
    sampler.sample(logits, allowed)
    assert torch.equal(logits[0], RAMP)


def test_logit_bias_adds_up(sampler):
    open_request(sampler, "a", GREEDY, logit_bias=((3, 50.0), (7, -100.0), (3, 1.0)))
    expected = RAMP.clone()
    expected[3] += 51.0
    expected[7] -= 100.0
    torch.testing.assert_close(adjusted(sampler, RAMP, "a")[0], expected)
    assert step(sampler, RAMP, "a") == [3]


def test_whole_number_biases_are_taken(sampler):
    open_request(sampler, "a", GREEDY, logit_bias=((2, 100),))
    assert step(sampler, RAMP, "a") == [2]


def test_tokens_are_forbidden_until_enough_were_produced(sampler):
    open_request(sampler, "a", GREEDY, forbidden=(9, 8), forbidden_until=3)
    assert [step(sampler, RAMP, "a")[0] for _ in range(5)] == [7, 7, 7, 9, 9]
    open_request(sampler, "b", GREEDY, forbidden=(9,), forbidden_until=3, output_ids=[1, 1])
    assert [step(sampler, RAMP, "b")[0] for _ in range(2)] == [8, 9]


def test_a_mask_allows_only_its_tokens(sampler):
    open_request(sampler, "a", GREEDY)
    open_request(sampler, "b", seed=2)
    allowed = torch.zeros(2, VOCAB, dtype=torch.bool)
    allowed[0, 5] = allowed[1, 2] = allowed[1, 6] = True
    for _ in range(10):
        first, second = step(sampler, RAMP, "a", "b", allowed=allowed)
        assert first == 5
        assert second in {2, 6}


def test_order_of_bias_penalties_and_prohibitions_lets_a_prohibition_win(sampler):
    open_request(sampler, "a", GREEDY, logit_bias=((9, 100.0),), forbidden=(9,), forbidden_until=1)
    assert float(adjusted(sampler, RAMP, "a")[0, 9]) == -math.inf
    assert step(sampler, RAMP, "a") == [8]
    assert step(sampler, RAMP, "a") == [9]


def test_removal_tolerates_unknown_ids_and_leaves_nothing(sampler):
    open_request(sampler, "a")
    sampler.remove_request("nobody")
    assert not sampler.at_rest()
    sampler.remove_request("a")
    assert sampler.at_rest()
    with pytest.raises(KeyError):
        sampler.begin(SamplerStep(("a",)), context("a"))


@pytest.mark.parametrize("shape", [(1, VOCAB), (3, VOCAB), (2, VOCAB - 1)])
def test_logits_of_another_shape_are_refused(sampler, shape):
    open_request(sampler, "a")
    open_request(sampler, "b")
    sampler.begin(SamplerStep(("a", "b")), context("a", "b"))
    with pytest.raises(ValueError, match="2 sampled rows and a vocabulary of 10"):
        sampler.sample(torch.zeros(shape))


def test_a_token_is_counted_without_the_host_reading_it():
    """A tape refuses operations that wait for a device value."""
    history, drawn = TokenHistory(VOCAB, [1], [2], torch.device("cpu")), torch.tensor([3, 5])
    with torch.inference_mode():
        graph = CpuBackend(capture="tape").create_graph()
        graph.capture(lambda: history.add(drawn[1]) or {})
        counts, seen = torch.zeros(VOCAB), torch.zeros(VOCAB, dtype=torch.bool)
        history.copy_to(counts, seen)
    assert counts.nonzero().flatten().tolist() == [2, 5]
    assert seen.nonzero().flatten().tolist() == [1, 2, 5]
