"""A request begins on one engine and goes on on another: the output is that of one engine."""

from __future__ import annotations

import threading

import msgspec
import pytest

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.sequence_maker import child_id
from phalanx.schema.control import Flush
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.generate import GenerateRequest, Handoff, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive

PROMPT = tuple(range(5, 45))
SAMPLED = SamplingParams(
    max_new_tokens=12,
    sampling_seed=5,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    repetition_penalty=1.2,
    min_new_tokens=3,
    ignore_eos=True,
)


def request_of(sampling: SamplingParams, **fields) -> GenerateRequest:
    fields.setdefault("input_ids", PROMPT)
    return GenerateRequest(sampling=sampling, detokenize=False, **fields)


class Two:
    """A prefill and a decode service in this process."""

    def __init__(self, model, **options) -> None:
        self.prefill, self.decode = Drive(model, **options), Drive(model, **options)
        self._woken = threading.Event()
        for one in (self.prefill, self.decode):
            one.service.wake_with(self._woken.set)

    def drive(self, one: Drive, rid: str, request: GenerateRequest) -> None:
        one.start(rid, request)
        while rid not in one.ended:
            if one.service.busy:
                one.tick()
            else:
                self.wait()

    def wait(self) -> None:
        """Until something outside of a service has changed."""
        self._woken.wait()
        self._woken.clear()

    def handed(self, request: GenerateRequest, rid: str = "p") -> Handoff:
        self.drive(self.prefill, rid, msgspec.structs.replace(request, hands_over=True))
        handoff = self.prefill.output(rid).handoff
        assert handoff is not None
        return msgspec.msgpack.decode(msgspec.msgpack.encode(handoff), type=Handoff)

    def resumed(self, request: GenerateRequest, handoff: Handoff, rid: str = "d"):
        self.drive(self.decode, rid, msgspec.structs.replace(request, handoff=handoff))

    def close(self) -> None:
        for one in (self.prefill, self.decode):
            one.service.close()
            assert one.service._engine.at_rest()


@pytest.fixture(params=["shm", "tcp"])
def two(request, tiny):
    both = Two(tiny, transfer=request.param)
    yield both
    both.close()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "sampling", [SAMPLED, SamplingParams(temperature=0.0, max_new_tokens=12)], ids=["drawn", "best"]
)
def test_the_output_is_that_of_one_engine(tiny, two: Two, sampling: SamplingParams, n: int):
    request = request_of(
        msgspec.structs.replace(sampling, n=n), logprobs=LogprobOptions(top_k=2, token_ids=(7,))
    )
    [expected] = Drive(tiny).run(request)
    two.resumed(request, two.handed(request))
    output = two.decode.output("d")
    for one, other in zip(output.completions, expected.completions, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs.token_ids == other.logprobs.token_ids
        # A step's rows may round one another's logits differently.
        assert one.logprobs.values == pytest.approx(other.logprobs.values, abs=1e-5)
    assert output.prompt_tokens == expected.prompt_tokens


@pytest.mark.parametrize("num_tokens", [40, 45, 48])
@pytest.mark.parametrize("n", [1, 2])
def test_an_engine_goes_on_from_its_own_handoff(tiny, two: Two, num_tokens: int, n: int):
    request = request_of(
        msgspec.structs.replace(SAMPLED, n=n),
        input_ids=tuple(range(5, 5 + num_tokens)),
    )
    [expected] = Drive(tiny).run(request)
    handoff = two.handed(request)
    two.drive(two.prefill, "d", msgspec.structs.replace(request, handoff=handoff))
    for one, other in zip(two.prefill.output("d").completions, expected.completions, strict=True):
        assert one.token_ids == other.token_ids


@pytest.mark.parametrize("max_new_tokens", [0, 1])
def test_what_ends_at_once_holds_nothing(two: Two, max_new_tokens: int):
    request = request_of(
        msgspec.structs.replace(SAMPLED, max_new_tokens=max_new_tokens, min_new_tokens=0)
    )
    handoff = two.handed(request)
    assert handoff.handles() == ()
    two.resumed(request, handoff)
    output = two.decode.ended["d"].payload
    assert output.completions[0].token_ids == handoff.sequences[0].output_ids
    assert output.completions[0].finish_reason.length == max_new_tokens


def test_nothing_is_flushed_while_another_engine_has_yet_to_read(two: Two):
    request = request_of(SAMPLED)
    handoff = two.handed(request)
    assert not two.prefill.service.control(Flush())
    two.resumed(request, handoff)
    while not two.prefill.service.control(Flush()):
        two.wait()


def test_a_cancelled_prefill_hands_nothing_over(two: Two):
    two.prefill.start("p", request_of(SAMPLED, hands_over=True))
    two.prefill.service.cancel("p")
    two.prefill.finish()
    assert two.prefill.output("p").handoff is None


def first_of_two_held(model) -> Drive:
    """A service in which one of two completions is held and the other one is being computed."""
    drive = Drive(model, max_step_tokens=48)
    sampling = msgspec.structs.replace(SAMPLED, n=2)
    drive.start("p", request_of(sampling, hands_over=True))
    while not holds_of(drive):
        drive.tick()
    assert "p" not in drive.ended
    return drive


def holds_of(drive: Drive):
    return drive.service._cache._transfer._transfer.holds


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_what_is_held_of_a_request_that_does_not_end_whole_is_dropped(tiny, how: str):
    drive = first_of_two_held(tiny)
    if how == "cancel":
        drive.service.cancel("p")
    else:
        drive.service._loop.fail(child_id("p", 1, 2), RuntimeError("broken"))
    drive.finish()
    assert len(holds_of(drive)) == 0
    if how == "cancel":
        assert drive.output("p").handoff is None
    else:
        assert str(drive.error("p")) == "broken"
    drive.service.close()


def test_what_is_held_after_another_completion_failed_is_dropped(tiny):
    """Both in one tick, the failure first."""
    drive = Drive(tiny)
    drive.start("p", request_of(msgspec.structs.replace(SAMPLED, n=2), hands_over=True))
    while not holds_of(drive):
        drive.service._loop.fail(child_id("p", 0, 2), RuntimeError("broken"))
        drive.service._loop._advance()
    drive.finish()
    assert str(drive.error("p")) == "broken"
    assert len(holds_of(drive)) == 0
    drive.service.close()


def test_a_decode_that_is_cancelled_before_it_runs_lets_go(two: Two):
    request = request_of(SAMPLED)
    handoff = two.handed(request)
    holds = two.prefill.service._cache._transfer._transfer.holds
    ended = threading.Event()
    holds.watch(handoff.handles()[0].hold, lambda ending: ended.set())
    two.decode.start("d", msgspec.structs.replace(request, handoff=handoff))
    two.decode.service.cancel("d")
    two.decode.finish()
    ended.wait()
    assert len(holds) == 0


@pytest.mark.parametrize("change", ["prompt", "completions"])
def test_a_handoff_of_another_request_is_refused(two: Two, change: str):
    request = request_of(SAMPLED)
    handoff = two.handed(request)
    if change == "prompt":
        other = msgspec.structs.replace(request, input_ids=PROMPT[:-1])
        two.resumed(other, handoff)
        assert "prompt of 40 tokens and this one has 39" in str(two.decode.error("d"))
    else:
        with pytest.raises(ValueError, match="n=2"):
            request_of(msgspec.structs.replace(SAMPLED, n=2), handoff=handoff)


def with_stream(done, **fields):
    stream = msgspec.structs.replace(done.kv.ranks[0]["main"], **fields)
    return {"kv": msgspec.structs.replace(done.kv, ranks={0: {"main": stream}})}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda done: {"output_ids": ()}, "stored state and no output_ids"),
        (lambda done: {"positions": {}}, "0 tokens in positions and the prompt has 40"),
        (lambda done: {"positions": {"main": 41}}, "41 tokens in positions"),
        (lambda done: {"kv": msgspec.structs.replace(done.kv, ranks={})}, "0 tokens in kv"),
        (lambda done: {"kv": msgspec.structs.replace(done.kv, ranks={0: {}})}, "0 tokens in kv"),
        (lambda done: with_stream(done, length=39), "39 tokens in kv"),
    ],
)
def test_an_incomplete_handoff_is_refused(two: Two, change, said: str):
    request = request_of(SAMPLED)
    handoff = two.handed(request)
    [done] = handoff.sequences
    changed = msgspec.structs.replace(done, **change(done))
    two.resumed(request, msgspec.structs.replace(handoff, sequences=(changed,)))
    error = two.decode.error("d")
    assert isinstance(error, InvalidRequestError)
    assert error.field == "handoff"
    assert said in str(error)


def test_a_prefill_that_has_ended_fails_the_decode(two: Two):
    request = request_of(SAMPLED)
    handoff = two.handed(request)
    two.prefill.service.close()
    two.resumed(request, handoff)
    assert "cannot be read" in str(two.decode.error("d"))


def test_steps_prepared_ahead_do_not_hinder_it(tiny):
    two = Two(tiny, speculate=True)
    request = request_of(SAMPLED)
    [expected] = Drive(tiny).run(request)
    two.resumed(request, two.handed(request))
    assert two.decode.output("d").completions[0].token_ids == expected.completions[0].token_ids
    two.close()


@pytest.mark.long
def test_in_workers_of_two_replicas(tiny_dir):
    args = CausalLMArgs(tiny_dir, pool_tokens=1024, native_operators="off")
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    request = request_of(SAMPLED)
    deployment = DeploymentConfig(mode="local", replica_count=2)
    with (
        Engine(EngineArgs("causal_lm", args, config), deployment=deployment) as prefill,
        Engine(EngineArgs("causal_lm", args, config)) as decode,
    ):
        expected = decode.step(request)
        for _ in range(3):
            handoff = prefill.step(msgspec.structs.replace(request, hands_over=True)).handoff
            output = decode.step(msgspec.structs.replace(request, handoff=handoff))
            assert output.completions[0].token_ids == expected.completions[0].token_ids
