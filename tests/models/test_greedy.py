"""Greedy ids of SmolLM2 in float32: known ones, and those of transformers on the same weights."""

from __future__ import annotations

import pytest

from phalanx.schema.generate import GenerateRequest, Length, LogprobOptions, Stop
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive, load
from tests.models.references import log_probabilities

CAPITAL, SEA, FRUITS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
)
# fmt: off
KNOWN = {
    CAPITAL: [504, 3575, 282, 4649, 314, 7042, 30, 2],
    SEA: [
        504, 3426, 314, 253, 4749, 284, 11965, 7815, 28, 30055, 351, 1029, 284, 551, 1719, 281, 624,
        1038, 970, 28, 253, 21651, 288, 260, 551, 1719, 6122, 282, 260, 6128, 30, 2,
    ],
    FRUITS: [
        4590, 359, 1296, 5574, 338, 359, 3468, 327, 253, 2458, 284, 8609, 2714, 42, 1116, 33, 30,
        12619, 12310, 42, 1069, 359, 904, 281, 12074, 28, 527, 314, 1895, 327, 4719, 2458,
    ],
}
CAPITAL_OF_32 = [
    504, 3575, 282, 4649, 314, 7042, 30, 657, 506, 253, 2240, 38128, 281, 1463, 284, 2517, 28, 1343,
    327, 624, 13329, 22387, 702, 260, 414, 46682, 18669, 28, 5991, 36462, 5389, 28,
]
# fmt: on


def chat_ids(model, prompt: str) -> tuple[int, ...]:
    text = model.tokenizer.render_chat([{"role": "user", "content": prompt}])
    return tuple(model.tokenizer.encode_chat(text))


def greedy(ids, **sampling) -> GenerateRequest:
    params = {"temperature": 0.0, "max_new_tokens": 32, **sampling}
    return GenerateRequest(input_ids=tuple(ids), sampling=SamplingParams(**params))


def ids_of(output) -> list[int]:
    return list(output.completions[0].token_ids)


@pytest.fixture(scope="module")
def eight(shallow):
    """Eight requests of mixed lengths, and the ids that are known of the first four."""
    requests = [greedy(chat_ids(shallow, prompt)) for prompt in KNOWN]
    requests.append(greedy(requests[0].input_ids, min_new_tokens=32))
    tale = shallow.tokenizer.encode("Once upon a time there was a lighthouse. " * 14)
    requests += [greedy(tale[:length], max_new_tokens=16) for length in (1, 5, 90, 121)]
    return requests, [*KNOWN.values(), CAPITAL_OF_32]


@pytest.fixture(scope="module")
def verify(eight, smollm2_reference_model):
    """Checks the ids of all eight: transformers finds each most likely where we chose it."""
    requests, known = eight
    checked: set[tuple[int, ...]] = set()

    def check(outputs):
        assert [ids_of(output) for output in outputs[:4]] == known
        for request, output in zip(requests[4:], outputs[4:], strict=True):
            text = (*request.input_ids, *ids_of(output))
            if text not in checked:
                best = log_probabilities(smollm2_reference_model, text).argmax(dim=-1).tolist()
                assert best[len(request.input_ids) :] == ids_of(output)
                checked.add(text)

    return check


@pytest.mark.long
def test_known_ids_alone(smollm2, eight):
    requests, known = eight
    assert [len(request.input_ids) for request in requests[:3]] == [37, 37, 34]
    drive = Drive(smollm2)
    outputs = [drive.run(request)[0] for request in requests[:4]]
    assert [ids_of(output) for output in outputs] == known
    reasons = [output.completions[0].finish_reason for output in outputs]
    assert reasons == [Stop(2), Stop(2), Length(32), Length(32)]
    assert outputs[0].completions[0].text == "The capital of France is Paris."


@pytest.mark.long
@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_eight_together(smollm2, eight, verify, max_step_tokens):
    drive = Drive(smollm2, max_step_tokens=max_step_tokens)
    verify(drive.run(*eight[0]))
    assert drive.service.statistics().num_retractions == 0


@pytest.mark.long
def test_eight_in_a_pool_for_three(smollm2, eight, verify):
    """Requests are pushed back as they outgrow the pool, and nothing of it shows."""
    drive = Drive(smollm2, pool_tokens=176, max_step_tokens=64)
    outputs = drive.run(*eight[0])
    verify(outputs)
    retractions = sum(output.num_retractions for output in outputs)
    assert retractions == drive.service.statistics().num_retractions > 0


def test_eight_of_the_first_layers_in_a_pool_for_three(shallow, eight, shallow_reference_model):
    """The same pushing back by a model that costs little, against transformers alone."""
    drive = Drive(shallow, pool_tokens=176, max_step_tokens=64)
    outputs = drive.run(*eight[0])
    for request, output in zip(eight[0], outputs, strict=True):
        text = (*request.input_ids, *ids_of(output))
        best = log_probabilities(shallow_reference_model, text).argmax(dim=-1).tolist()
        assert best[len(request.input_ids) :] == ids_of(output)
    assert drive.service.statistics().num_retractions > 0


@pytest.mark.long
def test_eight_with_plain_torch_operators(smollm2_dir, eight, verify):
    drive = Drive(load(smollm2_dir, native_operators="off"), max_step_tokens=48)
    verify(drive.run(*eight[0]))


def test_white_space_before_digits(shallow):
    """A text prompt is split into single digits before it is split at white space."""
    request = GenerateRequest(
        prompt="a  12",
        sampling=SamplingParams(max_new_tokens=0),
        logprobs=LogprobOptions(prompt_start=0),
    )
    [output] = Drive(shallow).run(request)
    assert output.prompt_logprobs.token_ids == (81, 256, 33, 34)
