"""New weights in a running service: every way they come in, what is refused, and who says so."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.schema.control import (
    CheckWeights,
    Continue,
    LoadWeights,
    Pause,
    PauseMode,
    ReadWeight,
    ReplaceWeights,
    SetWeightVersion,
    WeightCheck,
)
from phalanx.schema.generate import Stop
from tests.models.driver import BFLOAT16, FLOAT32, Drive, load
from tests.models.operated import (
    answer,
    answer_of,
    check_spans,
    drive,
    oracle,
    request,
    save,
    save_changed,
    tick,
    update,
    weights_of,
)
from tests.models.test_families import llama_with_biases, qwen2, qwen3_tied


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two checkpoints of one geometry, made by each of some models."""
    known = {}

    def of(make=None):
        if make not in known:
            base = tmp_path_factory.mktemp("weights")
            more = () if make is None else (make,)
            known[make] = tuple(save(base / name, seed, *more) for seed, name in enumerate("ab"))
        return known[make]

    return of


@pytest.fixture
def two(directories):
    return directories()


def replace_all(driven: Drive, directory, version="new", *, as_one=False) -> None:
    tensors = weights_of(directory, as_one=as_one)
    assert driven.service.control(ReplaceWeights(tensors, version))


def replace_one_by_one(driven: Drive, directory) -> None:
    for name, tensor in weights_of(directory).items():
        assert driven.service.control(ReplaceWeights({name: tensor}, "new"))


def replace_fused(driven: Drive, directory) -> None:
    replace_all(driven, directory, as_one=True)


WAYS = [update, replace_all, replace_fused, replace_one_by_one]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [None, llama_with_biases, qwen2, qwen3_tied])
def test_new_weights_compute_what_a_fresh_model_computes(directories, make, way):
    first, second = directories(make)
    driven = drive(first)
    assert answer(driven) == answer_of(first)
    way(driven, second)
    assert answer(driven) == answer_of(second) != answer_of(first)


INT8 = {"quantization": "int8"}


@pytest.mark.parametrize(
    ("config", "options", "ways"),
    [
        (BFLOAT16, {}, WAYS),
        (FLOAT32, {"native_operators": "off"}, WAYS),
        # One by one, rows that are not replaced yet are rounded twice.
        (BFLOAT16, INT8, [update, replace_all, replace_fused]),
    ],
)
def test_new_weights_are_packed_as_the_old_ones_were(two, config, options, ways):
    for way in ways:
        check_packed_again(way, two, config, options)


def check_packed_again(way, two, config, options):
    first, second = two
    driven = drive(first, config, **options)
    packed = driven.service.weights.packed_bytes
    way(driven, second)
    assert answer(driven) == answer_of(second, config, **options)
    assert driven.service.weights.packed_bytes == packed


def test_captured_steps_are_captured_again(two):
    first, second = two
    model = load(first, native_operators="off")
    captured = changed(model, backend=CpuBackend(capture="tape"))
    driven = Drive(captured, max_batch_size=2, context_length=64, page_size=4)
    unscored = request()
    before = answer(driven, unscored)
    update(driven, second)
    after = answer(driven, unscored)
    assert after == answer(drive(second, native_operators="off"), unscored) != before
    graphs = driven.service._engine._nodes["decoder"].graphs._graphs
    assert graphs.captures


def test_the_callers_tensors_may_change_afterwards(two):
    first, second = two
    driven = drive(first, native_operators="off")
    tensors = weights_of(second)
    assert driven.service.control(ReplaceWeights(tensors, "new"))
    for tensor in tensors.values():
        tensor.zero_()
    assert answer(driven) == answer_of(second, native_operators="off")


def test_a_checkpoint_may_be_written_anew_after_it_was_loaded(two, tmp_path):
    first, second = two
    copied = save_changed(second, tmp_path / "rotating", lambda tensors: None)
    driven = drive(first, native_operators="off")
    update(driven, copied)
    weights = copied / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 3)
        file.write(bytes(weights.stat().st_size // 2))
    assert answer(driven) == answer_of(second, native_operators="off")


FLOAT8 = torch.float8_e4m3fn


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def changing(change):
    return lambda directory: save_changed(directory, directory / "changed", change)


REFUSED = [
    ({"model.norm.weight": torch.zeros(31)}, "shape"),
    ({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}, "int32"),
    ({"model.norm.weight": [1.0] * 32}, "list"),
    ({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, "not one of this model"),
]


@pytest.mark.parametrize(("tensors", "reason"), REFUSED)
def test_weights_that_do_not_fit_are_refused_before_anything_changes(two, tensors, reason):
    first, second = two
    driven = drive(first)
    good = {"model.embed_tokens.weight": weights_of(second)["model.embed_tokens.weight"]}
    [bad] = tensors
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        driven.service.control(ReplaceWeights({**good, **tensors}, "new"))
    assert raised.value.field == bad
    assert answer(driven) == answer_of(first)
    assert driven.run(request())[0].weight_version == "default"


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda one: one / "nowhere", "nowhere"),
        (changing(without("model.norm.weight")), "missing model.norm.weight"),
        (changing(lambda found: {**found, "x": torch.zeros(3)}), "unexpected x"),
        (
            changing(lambda found: {**found, "model.norm.weight": torch.zeros(4)}),
            "misshapen model.norm.weight",
        ),
        (
            changing(
                lambda found: {**found, "model.norm.weight": found["model.norm.weight"].int()}
            ),
            "model.norm.weight in I32",
        ),
        (
            changing(lambda found: {**found, "model.norm.weight": torch.ones(32).to(FLOAT8)}),
            "model.norm.weight in F8_E4M3",
        ),
        (lambda one: one / ("x" * 300), "too long"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(
    tmp_path, two, break_it, reason
):
    copied = save_changed(two[1], tmp_path / "copy", lambda tensors: None)
    driven = drive(two[0])
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        driven.service.control(LoadWeights(str(break_it(copied)), "new"))
    assert raised.value.field == "path"
    assert answer(driven) == answer_of(two[0])


def test_a_truncated_checkpoint_is_refused(tmp_path, two):
    copied = save_changed(two[1], tmp_path / "copy", lambda tensors: None)
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    driven = drive(two[0])
    with pytest.raises(InvalidRequestError, match="damaged"):
        driven.service.control(LoadWeights(str(copied)))
    assert answer(driven) == answer_of(two[0])


@pytest.mark.parametrize("options", [{}, {"speculate": True}])
def test_a_request_that_runs_across_updates_names_every_version(two, options):
    first, second = two
    driven = drive(first, **options)
    for index in range(3):
        driven.start(f"r{index}", request(5 + 4 * index, 20, first=index, n=1 + index % 2))
    tick(driven, 5)
    update(driven, second, "v2")
    tick(driven, 4)
    update(driven, first, "v3")
    driven.finish()
    models = {"default": oracle(first), "v2": oracle(second), "v3": oracle(first)}
    for rid in ("r0", "r1", "r2"):
        output = driven.output(rid)
        [names] = {tuple(name for name, _ in one.weight_versions) for one in output.completions}
        assert names == ("default", "v2", "v3")
        assert output.weight_version == "v3"
        assert output.weight_versions == output.completions[0].weight_versions
        assert output.num_retractions == 2 * len(output.completions)
        check_spans(output, request(5 + 4 * int(rid[1]), first=int(rid[1])).input_ids, models)
        deltas = [delta for delta in driven.deltas[rid] if delta.index == 0]
        whole = deltas[0]
        for delta in deltas[1:]:
            whole = whole.merged(delta)
        assert whole.weight_versions == output.weight_versions


def test_an_update_without_a_version_shows_in_the_spans(two):
    driven = drive(two[0])
    driven.start("r", request(4, 6))
    tick(driven, 3)
    update(driven, two[1])
    driven.finish()
    assert driven.output("r").weight_versions == (("default", 3), ("default", 3))


def test_a_version_can_be_named_afterwards(two):
    driven = drive(two[0])
    assert driven.service.control(SetWeightVersion("named"))
    output = driven.run(request(4, 3))[0]
    assert (output.weight_version, output.weight_versions) == ("named", (("named", 3),))


def test_what_computes_no_token_says_the_version_too(two):
    driven = drive(two[0])
    update(driven, two[1], "v2")
    [output] = driven.run(request(6, 0, scored=True))
    assert (output.weight_version, output.weight_versions) == ("v2", ())


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_prompts_scores_are_of_one_version(two, num_tokens):
    first, second = two
    wanted = request(40, num_tokens, scored=True)
    driven = drive(first, max_step_tokens=8)
    driven.start("r", wanted)
    tick(driven, 3)
    update(driven, second)
    driven.finish()
    expected = drive(second, max_step_tokens=8).run(wanted)[0]
    assert driven.output("r").prompt_logprobs == expected.prompt_logprobs
    assert driven.output("r").completions[0].logprobs == expected.completions[0].logprobs


def test_what_was_cached_is_forgotten_with_its_weights(two):
    first, second = two
    driven = drive(first)
    driven.run(request(30))
    assert driven.run(request(30))[0].cached_tokens > 0
    update(driven, second)
    [output] = driven.run(request(30))
    assert output.cached_tokens == 0
    [expected] = drive(second).run(request(30))
    assert output.completions[0].token_ids == expected.completions[0].token_ids


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_partial_rollout_goes_on_with_the_new_weights(two, mode):
    first, second = two
    driven = drive(first)
    driven.start("r", request(6, 12))
    tick(driven, 4)
    assert driven.service.control(Pause(mode))
    update(driven, second, "v2")
    assert driven.service.control(Continue())
    driven.finish()
    output = driven.output("r")
    assert output.weight_versions == (("default", 4), ("v2", 8))
    check_spans(output, request(6).input_ids, {"default": oracle(first), "v2": oracle(second)})


def test_a_stop_is_kept_over_an_update(two):
    driven = drive(two[0])
    driven.start("r", request(6, 1))
    driven.finish()
    token = driven.output("r").completions[0].token_ids[0]
    [output] = driven.run(request(6, 4, stop_token_ids=(token,)))
    assert output.completions[0].finish_reason == Stop(token)


def test_weights_can_be_read_and_compared(two):
    first, second = two
    driven = drive(first)
    ask = driven.service.ask
    for name, tensor in [*weights_of(first).items(), *weights_of(first, as_one=True).items()]:
        sample = ask(ReadWeight(name, 40))
        assert sample.shape == tuple(tensor.shape)
        assert list(sample.values) == tensor.flatten()[:40].tolist()
        assert sample.dtype == "float32"
    with pytest.raises(InvalidRequestError, match="snapshot"):
        ask(CheckWeights(WeightCheck.COMPARE))
    taken = ask(CheckWeights(WeightCheck.SNAPSHOT))
    assert ask(CheckWeights(WeightCheck.COMPARE)).differing == ()
    name = "model.layers.1.self_attn.v_proj.weight"
    assert driven.service.control(ReplaceWeights({name: weights_of(second)[name]}))
    report = ask(CheckWeights(WeightCheck.COMPARE))
    assert report.differing == (name,)
    assert (
        report.checksum
        != taken.checksum
        == drive(first).service.ask(CheckWeights(WeightCheck.CHECKSUM)).checksum
    )


@pytest.mark.parametrize(
    ("question", "field"),
    [(ReadWeight("nothing", 3), "name"), (ReadWeight("model.norm.weight", 0), "limit")],
)
def test_questions_that_have_no_answer_are_refused(two, question, field):
    with pytest.raises(InvalidRequestError) as raised:
        drive(two[0]).service.ask(question)
    assert raised.value.field == field


def test_noise_in_place_of_weights_gives_way_to_an_update(two):
    first, second = two
    driven = drive(first)
    driven.run(request(30))
    driven.service.ask(CheckWeights(WeightCheck.RESET_TENSORS))
    noise = answer(driven)
    assert noise != answer_of(first)
    update(driven, second)
    assert answer(driven) == answer_of(second)


class OutOfMemory:
    """Operators that cannot pack a weight any more."""

    def __init__(self, operators):
        self._operators = operators

    def pack_weight(self, weight, quantization):
        raise MemoryError("no memory for a packed weight")


def test_an_update_that_breaks_off_says_so_and_waits_for_weights(two):
    first, second = two
    driven = drive(first)
    weights = driven.service.weights
    good, weights._operators = weights._operators, OutOfMemory(weights._operators)
    with pytest.raises(RequestFailedError, match=r"no memory.*waits for weights"):
        driven.service.control(LoadWeights(str(second), "v2"))
    statistics = driven.service.statistics()
    assert (statistics.waiting_for_weights, statistics.asleep) == (True, frozenset())
    weights._operators = good
    update(driven, second, "v2")
    assert answer(driven) == answer_of(second)
