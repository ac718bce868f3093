"""Draws that depend on their own request only, and the effect of every sampling parameter."""

from __future__ import annotations

import pytest
import torch
import transformers

from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive
from tests.models.references import log_probabilities

PROMPT = (5, 80, 211, 17, 42)
VOCABULARY = 400


@pytest.fixture(scope="module")
def reference(tiny_dir):
    return transformers.LlamaForCausalLM.from_pretrained(tiny_dir).eval().requires_grad_(False)


def request(prompt=PROMPT, logprobs=None, **sampling) -> GenerateRequest:
    params = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    return GenerateRequest(
        input_ids=prompt,
        sampling=SamplingParams(**params),
        logprobs=logprobs,
        detokenize=False,
    )


def tokens(output, index=0) -> tuple[int, ...]:
    return output.completions[index].token_ids


def others(count):
    return [
        request(
            tuple(range(3 + index, 3 + index + 7 * (index + 1))),
            sampling_seed=index,
            top_p=0.9 if index % 2 else 1.0,
            temperature=index % 3,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.8}, {"top_k": 20, "min_p": 0.01}, {"presence_penalty": 1.0}]
)
def test_a_seed_reproduces_whatever_else_is_in_the_batch(tiny, filters):
    seeded = request(sampling_seed=1234, **filters)
    [alone] = Drive(tiny).run(seeded)
    assert len(set(tokens(alone))) > 5
    for count in (1, 5):
        together = Drive(tiny, max_step_tokens=16).run(*others(count), seeded, *others(1))
        assert tokens(together[count]) == tokens(alone)


def test_a_seed_reproduces_after_a_push_back(tiny):
    seeded = request(sampling_seed=99, repetition_penalty=1.2, frequency_penalty=0.3)
    [alone] = Drive(tiny).run(seeded)
    drive = Drive(tiny, pool_tokens=64, page_size=4)
    outputs = drive.run(request(sampling_seed=1), request(sampling_seed=2), seeded)
    assert outputs[2].num_retractions > 0
    assert tokens(outputs[2]) == tokens(alone)


def test_completions_differ_and_reproduce(tiny):
    several = request(sampling_seed=7, n=4)
    [first] = Drive(tiny).run(several)
    assert len({completion.token_ids for completion in first.completions}) == 4
    [single] = Drive(tiny).run(request(sampling_seed=7))
    assert tokens(single) == tokens(first)
    outputs = Drive(tiny, pool_tokens=64, page_size=4).run(*others(2), several)
    assert outputs[2].num_retractions > 0
    assert outputs[2].completions == first.completions


def test_without_a_seed_the_id_decides(tiny):
    drive = Drive(tiny)
    for rid in ("a", "b"):
        drive.start(rid, request())
    drive.finish()
    again = Drive(tiny)
    again.start("a", request())
    again.finish()
    assert tokens(drive.output("a")) != tokens(drive.output("b"))
    assert tokens(drive.output("a")) == tokens(again.output("a"))


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"temperature": 1e-40},
        {"temperature": 1e-4},
    ],
)
def test_limits_of_the_filters_are_greedy(tiny, limits):
    [greedy] = Drive(tiny).run(request(temperature=0.0, sampling_seed=3))
    [output] = Drive(tiny).run(request(sampling_seed=3, **limits))
    assert tokens(output) == tokens(greedy)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.7, "min_p": 0.05}],
)
def test_filters_keep_what_they_say(tiny, filters):
    """Every drawn token is among those that the filters leave, and more than one of them is."""
    options = LogprobOptions(token_ids=tuple(range(VOCABULARY)))
    drawn = Drive(tiny).run(
        *(request(sampling_seed=seed, logprobs=options, **filters) for seed in range(3))
    )
    ranks = set()
    for output in drawn:
        completion = output.completions[0]
        for token, row in zip(completion.token_ids, completion.logprobs.selected, strict=True):
            probabilities = torch.tensor([value for value, _ in row]).exp()
            kept = kept_by(probabilities, **filters)
            assert token in kept
            ranks.add(kept.index(token))
    assert len(ranks) > 1


def kept_by(probabilities, top_k=-1, top_p=1.0, min_p=0.0) -> list[int]:
    order = probabilities.argsort(descending=True).tolist()
    if top_k > 0:
        order = order[:top_k]
    total = probabilities[order].sum()
    kept, before = [], 0.0
    for token in order:
        if before < top_p * total and probabilities[token] >= min_p * probabilities[order[0]]:
            kept.append(token)
        before += probabilities[token]
    return kept


def test_draws_follow_the_distribution(tiny, reference):
    """Of 2,000 first tokens, as many are of each kind as the model says, to 5 deviations."""
    several = request(max_new_tokens=1, temperature=1.5, n=250)
    outputs = Drive(tiny, max_step_tokens=2048, max_batch_size=256, pool_tokens=4096).run(
        *([several] * 8)
    )
    counts = torch.zeros(VOCABULARY)
    for output in outputs:
        for completion in output.completions:
            counts[completion.token_ids[0]] += 1
    scores = log_probabilities(reference, (*PROMPT, 0))[-1]
    expected = torch.softmax(scores / 1.5, dim=-1) * 2000
    deviation = (counts - expected).abs() / expected.clamp(min=1.0).sqrt()
    assert counts.sum() == 2000
    assert deviation.max() < 5.0


def test_bias(tiny):
    forced, greedy = Drive(tiny).run(
        request(temperature=0.0, logit_bias=((7, 100.0),)), request(temperature=0.0)
    )
    assert set(tokens(forced)) == {7}
    first = tokens(greedy)[0]
    [avoided] = Drive(tiny).run(request(logit_bias=((first, -100.0), (first, -100.0))))
    assert first not in tokens(avoided)


@pytest.mark.parametrize(
    "penalties",
    [
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": -0.5, "presence_penalty": 2.0, "repetition_penalty": 1.1},
    ],
)
@pytest.mark.parametrize("pool_tokens", [1024, 40])
def test_penalties(tiny, reference, penalties, pool_tokens):
    """Each greedy token is the best one of transformers' logits after the penalties."""
    drive = Drive(tiny, pool_tokens=pool_tokens, page_size=4)
    companion = request(tuple(range(9, 14)), temperature=0.0)
    output = drive.run(companion, request(temperature=0.0, **penalties))[1]
    assert (output.num_retractions > 0) == (pool_tokens == 40)
    assert list(tokens(output)) == penalized(reference, len(tokens(output)), **penalties)


def penalized(
    model, count, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0
) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        logits = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1]
        seen = torch.zeros(VOCABULARY, dtype=torch.bool)
        seen[[*PROMPT, *output]] = True
        scaled = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        times = torch.zeros(VOCABULARY)
        for token in output:
            times[token] += 1
        logits = logits - frequency_penalty * times - presence_penalty * (times > 0)
        output.append(int(logits.argmax()))
    return output
