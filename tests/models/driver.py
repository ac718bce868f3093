"""Runs requests through a service as the engine's loop does, and keeps what came of them."""

from __future__ import annotations

from phalanx.engine_config import DeviceConfig, EngineConfig, use_engine_config
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.loading import LoadedModel, build_service, load_model
from phalanx.models.causal_lm.service import CausalLMService
from phalanx.schema.events import Delta, Failed, Final, Scheduled
from phalanx.schema.generate import GenerateDelta, GenerateOutput, GenerateRequest

FLOAT32 = EngineConfig(DeviceConfig("cpu", "float32"))
BFLOAT16 = EngineConfig(DeviceConfig("cpu", "bfloat16"))


def load(directory, config: EngineConfig = FLOAT32, **options) -> LoadedModel:
    with use_engine_config(config):
        return load_model(CausalLMArgs(directory, **options))


class Drive:
    """One service and the events of its requests."""

    def __init__(self, model: LoadedModel, config: EngineConfig = FLOAT32, **options) -> None:
        options.setdefault("pool_tokens", 1024)
        with use_engine_config(config):
            self.service: CausalLMService = build_service(model, CausalLMArgs("", **options))
        self.deltas: dict[str, list[GenerateDelta]] = {}
        self.scheduled: list[str] = []
        self.ended: dict[str, Final | Failed] = {}

    def start(self, rid: str, request: GenerateRequest) -> None:
        self.deltas[rid] = []
        self.service.start(rid, request)

    def tick(self) -> None:
        for event in self.service.tick():
            assert event.rid not in self.ended, f"{event} after the end"
            match event:
                case Scheduled(rid):
                    assert rid not in self.scheduled
                    self.scheduled.append(rid)
                case Delta(rid, payload):
                    self.deltas[rid].append(payload)
                case _:
                    self.ended[event.rid] = event

    def finish(self) -> None:
        """Tick until nothing is left, and check that nothing is."""
        while self.service.busy:
            self.tick()
        assert self.ended.keys() == self.deltas.keys()
        assert self.service._engine.at_rest()

    def run(self, *requests: GenerateRequest) -> list[GenerateOutput]:
        """The outputs of requests that start together."""
        first = len(self.deltas)
        rids = [f"request {first + index}" for index in range(len(requests))]
        for rid, request in zip(rids, requests, strict=True):
            self.start(rid, request)
        self.finish()
        return [self.output(rid) for rid in rids]

    def output(self, rid: str) -> GenerateOutput:
        """The final payload of a request, which its deltas must add up to."""
        event = self.ended[rid]
        assert isinstance(event, Final), event
        if not event.cancelled:
            self._check_deltas(rid, event.payload)
        return event.payload

    def error(self, rid: str) -> Exception:
        event = self.ended[rid]
        assert isinstance(event, Failed), event
        return event.error

    def _check_deltas(self, rid: str, output: GenerateOutput) -> None:
        for index, completion in enumerate(output.completions):
            deltas = [delta for delta in self.deltas[rid] if delta.index == index]
            whole = deltas[0]
            for delta in deltas[1:]:
                assert whole.finish_reason is None
                merged = whole.merged(delta)
                assert merged is not None
                whole = merged
            assert whole.token_ids == completion.token_ids
            assert whole.text == completion.text
            assert whole.finish_reason == completion.finish_reason
            assert whole.logprobs == completion.logprobs
            assert whole.prompt_logprobs == (output.prompt_logprobs if index == 0 else None)
