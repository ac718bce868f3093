"""One model over several ranks, real processes over gloo: the results of one rank, on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import BFLOAT16, FLOAT32
from tests.models.in_each_rank import (
    Run,
    kv_heads,
    logged,
    logged_in_each_rank,
    outputs_of,
    refusal_of_unequal_ranks,
    serve,
    with_a_slow_compiler,
)
from tests.models.logged_causal_lm import read_logs
from tests.models.references import fused, log_probabilities
from tests.models.test_families import (
    MODELS,
    SIZES,
    VOCABULARY,
    built,
    check,
    distribution,
    llama3,
    llama_with_biases,
    prompts,
    qwen2,
    qwen2_tied,
    qwen3,
    requests,
)
from tests.models.test_greedy import KNOWN, chat_ids, greedy, ids_of
from tests.parallel.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


def uneven():
    """Nothing of it divides by two or four: heads, inner width, vocabulary; biases everywhere."""
    sizes = {**SIZES, "vocab_size": 97, "intermediate_size": 57, "attention_bias": True}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes, hidden_size=54, num_attention_heads=9, num_key_value_heads=3
        )
    )


def equal_on_all(results):
    """What every rank has, down to the last bit."""
    for result in results[1:]:
        assert result == results[0]
    return results[0]


def check_known_ids(smollm2, smollm2_dir, ranks, *, num_alone, num_tokens):
    """Ids that are known, alone and in a batch; log-probabilities those of one rank."""
    prompts = [chat_ids(smollm2, prompt) for prompt in KNOWN]
    known = [ids[:num_tokens] for ids in KNOWN.values()]
    scored = [
        GenerateRequest(
            input_ids=ids,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=num_tokens),
            logprobs=LogprobOptions(prompt_start=0, top_k=3),
        )
        for ids in prompts
    ]
    by_itself = [greedy(ids, max_new_tokens=num_tokens) for ids in prompts[:num_alone]]
    runs = [Run(scored), *(Run([one]) for one in by_itself)]
    together, *alone = equal_on_all(ranks.run(serve, smollm2_dir, runs))
    assert [ids_of(output) for output in together] == known
    assert [ids_of(output) for [output] in alone] == known[:num_alone]
    [expected] = outputs_of(smollm2, [Run(scored)], FLOAT32)
    for output, other in zip(together, expected, strict=True):
        assert_near(output.prompt_logprobs, other.prompt_logprobs)
        assert_near(output.completions[0].logprobs, other.completions[0].logprobs)


def assert_near(found, expected):
    pairs = zip(found.values, expected.values, strict=True)
    differences = [abs(one - other) for one, other in pairs if other is not None]
    assert max(differences) < 1e-4


@pytest.mark.long
def test_known_ids_of_two_ranks(smollm2, smollm2_dir, two_ranks):
    """Nine query heads and three key-value heads, which two ranks cannot halve."""
    check_known_ids(smollm2, smollm2_dir, two_ranks, num_alone=1, num_tokens=32)


@pytest.mark.long
def test_known_ids_of_four_ranks(smollm2, smollm2_dir, four_ranks):
    """More ranks than key-value heads."""
    check_known_ids(smollm2, smollm2_dir, four_ranks, num_alone=1, num_tokens=12)


@pytest.mark.parametrize(
    ("make", "operators"),
    [*((make, "auto") for make in [*MODELS, uneven]), (qwen3, "off"), (uneven, "off")],
)
def test_every_token_of_every_position(tmp_path, two_ranks, make, operators):
    model = built(make)
    model.save_pretrained(tmp_path)
    run = Run(requests(), {"max_step_tokens": 32, "page_size": 8})
    results = two_ranks.run(partial(serve, native_operators=operators), tmp_path, [run])
    check(model, equal_on_all(results)[0])


@pytest.mark.long
@pytest.mark.parametrize("make", [llama3, qwen2_tied, uneven])
def test_more_ranks_than_key_value_heads(tmp_path, four_ranks, make):
    model = built(make)
    model.save_pretrained(tmp_path)
    assert four_ranks.run(kv_heads, tmp_path) == [1, 1, 1, 1]
    run = Run(requests(), {"max_step_tokens": 64})
    check(model, equal_on_all(four_ranks.run(serve, tmp_path, [run]))[0])


@pytest.mark.parametrize("make", [llama_with_biases, qwen2, qwen3, uneven])
def test_fused_layout(tmp_path, two_ranks, make):
    model = built(make)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        weights = fused({name: file.get_tensor(name) for name in file.keys()})
    save_file(weights, tmp_path / "model.safetensors")
    check(model, equal_on_all(two_ranks.run(serve, tmp_path, [Run(requests())]))[0])


def test_sharded_checkpoint(tmp_path, two_ranks):
    model = built(uneven)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(model, equal_on_all(two_ranks.run(serve, tmp_path, [Run(requests())]))[0])


@pytest.mark.parametrize(
    ("config", "quantization", "tolerance"),
    [(BFLOAT16, None, 0.05), (FLOAT32, "int8", 0.05), (BFLOAT16, "int8", 0.08)],
)
def test_rounded_weights(tmp_path, two_ranks, config, quantization, tolerance):
    """As near to float32 as one rank comes that rounds alike."""
    model = built(uneven)
    model.save_pretrained(tmp_path)
    call = partial(serve, quantization=quantization)
    [outputs] = equal_on_all(two_ranks.run(call, tmp_path, [Run(requests())], config))
    for ids, output in zip(prompts(), outputs, strict=True):
        expected = log_probabilities(model, ids)[1:, :VOCABULARY]
        difference = (distribution(output.prompt_logprobs)[1:] - expected).abs()
        assert len(ids) == 1 or 0 < difference.mean() < tolerance


def sampled(**sampling):
    """Draws without a seed of their own, of several completions, with all that looks back."""
    params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, **sampling}
    return GenerateRequest(input_ids=tuple(range(5, 45)), sampling=SamplingParams(**params))


def test_draws_without_a_seed_are_equal_on_all_ranks(tiny, tiny_dir, two_ranks):
    """And they are those of one rank: they follow the request's id."""
    many = [
        sampled(n=3),
        sampled(top_p=0.9, repetition_penalty=1.2, stop=("a", "e")),
        sampled(top_k=20, min_new_tokens=4, presence_penalty=0.5, stop_regex=("[0-9]",)),
    ]
    [outputs] = equal_on_all(two_ranks.run(serve, tiny_dir, [Run(many)]))
    [expected] = outputs_of(tiny, [Run(many)], FLOAT32)
    tokens = [[one.token_ids for one in output.completions] for output in outputs]
    assert tokens == [[one.token_ids for one in output.completions] for output in expected]
    assert len(set(tokens[0])) == 3


def test_all_ranks_choose_the_same_victims(tiny_dir, tmp_path, two_ranks):
    """Batches and push-backs of both ranks in a pool for two requests, and those of one rank."""
    many = [sampled(n=2, sampling_seed=1), *(sampled(temperature=0.0) for _ in range(4))]
    options = {"pool_tokens": 96, "page_size": 4, "max_step_tokens": 24, "prefix_cache": False}
    outputs = equal_on_all(
        two_ranks.run(partial(logged_in_each_rank, **options), tiny_dir, tmp_path, many)
    )
    assert sum(output.num_retractions for output in outputs) > 2
    [logs] = read_logs(tmp_path).values()
    assert len(logs) == 2
    victims = [line["pushed_back"] for line in logs[0] if "pushed_back" in line]
    assert sum(map(len, victims)) == sum(output.num_retractions for output in outputs)
    alone = tmp_path / "alone"
    alone.mkdir()
    assert logged(tiny_dir, alone, many, **options) == outputs
    [[expected]] = read_logs(alone).values()
    assert logs == [expected, expected]


@pytest.mark.long
def test_all_ranks_take_over_the_same_pages(tiny_dir, tmp_path, two_ranks):
    """Requests that begin alike, in a pool where what is kept makes way: batches are the same."""
    many = [sampled(n=2, sampling_seed=1, max_new_tokens=40), *(sampled(top_k=k) for k in (1, 9))]
    options = {"pool_tokens": 96, "page_size": 4, "max_step_tokens": 24}
    outputs = equal_on_all(
        two_ranks.run(partial(logged_in_each_rank, **options), tiny_dir, tmp_path, many)
    )
    assert [output.cached_tokens for output in outputs[1:]] == [36, 36]
    assert sum(output.num_retractions for output in outputs) > 0
    [logs] = read_logs(tmp_path).values()
    assert len(logs) == 2
    alone = tmp_path / "alone"
    alone.mkdir()
    assert logged(tiny_dir, alone, many, **options) == outputs
    [[expected]] = read_logs(alone).values()
    assert logs == [expected, expected]


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_defect_8_6_10_all_ranks_move_the_same_victims_to_the_host(
    tiny_dir, tmp_path, two_ranks, eviction
):
    """The host has room for some; the batches of both ranks and of one rank alone are the same."""
    many = [sampled(n=2, sampling_seed=1), *(sampled(temperature=0.0) for _ in range(4))]
    options = {
        "pool_tokens": 144,
        "page_size": 4,
        "max_step_tokens": 24,
        "host_pool_tokens": 60,
        "eviction": eviction,
        "prefix_cache": False,
    }
    outputs = equal_on_all(
        two_ranks.run(partial(logged_in_each_rank, **options), tiny_dir, tmp_path, many)
    )
    [logs] = read_logs(tmp_path).values()
    assert len(logs) == 2
    alone = tmp_path / "alone"
    alone.mkdir()
    assert logged(tiny_dir, alone, many, **options) == outputs
    [[expected]] = read_logs(alone).values()
    assert logs == [expected, expected]
    without = tmp_path / "without"
    without.mkdir()
    logged(tiny_dir, without, many, **{**options, "host_pool_tokens": 0})
    [[recomputed]] = read_logs(without).values()
    assert len(recomputed) > len(expected), "what is on the host is not computed again"


@pytest.mark.parametrize("slow_ranks", [{1}, {0}])
def test_no_rank_starts_before_all_have_the_grammar(tiny_dir, tmp_path, two_ranks, slow_ranks):
    """One rank has it before the first tick, the other one six ticks later."""
    structured = sampled(json_schema='{"type": "boolean"}')
    args = (tiny_dir, tmp_path, sampled(max_new_tokens=12), structured, slow_ranks, 6)
    ended = two_ranks.run(with_a_slow_compiler, *args)
    assert set(equal_on_all(ended)) == {"plain", "structured"}
    [[first, second]] = read_logs(tmp_path).values()
    assert first == second
    structured_in = [line["tick"] for line in first if "structured" in dict(line["rows"])]
    assert structured_in[0] > 6


@pytest.mark.parametrize(
    ("configs", "options", "named"),
    [
        ((FLOAT32, FLOAT32), ({"pool_tokens": 512}, {"pool_tokens": 256}), "pool_tokens=512 on"),
        ((FLOAT32, FLOAT32), ({}, {"quantization": "int8"}), "quantization=None on rank 0"),
        ((FLOAT32, BFLOAT16), ({}, {}), "params_dtype='float32' on rank 0"),
    ],
)
def test_ranks_that_were_started_differently_are_refused(
    tiny_dir, two_ranks, configs, options, named
):
    first, second = two_ranks.run(refusal_of_unequal_ranks, tiny_dir, configs, options)
    assert first.startswith(named)
    assert "differs from rank 1's" in first
    assert "differs from rank 0's" in second
