"""The text half of `phalanx generate`: a prompt becomes a request, its answer lines on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.clock import SystemClock
from phalanx.errors import ConfigurationError
from phalanx.plugin import ServingAdapter
from phalanx.schema.generate import GenerateDelta, GenerateOutput, GenerateRequest
from phalanx.schema.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class TextFlags:
    """What only text has; None where a flag is not given. `chat` None: as the checkpoint can."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    chat: bool | None = None
    stream: bool | None = None

    @property
    def given(self) -> list[str]:
        """The flags that were given."""
        values = (
            ("--max-new-tokens", self.max_new_tokens),
            ("--temperature", self.temperature),
            ("--chat", self.chat),
            ("--stream", self.stream),
        )
        return [flag for flag, value in values if value is not None]

    def sampling(self, seed: int | None) -> SamplingParams:
        most = self.max_new_tokens
        return SamplingParams(
            max_new_tokens=DEFAULT_NEW_TOKENS if most is None else most,
            temperature=self.temperature or 0.0,
            sampling_seed=seed,
        )

    def request(
        self, text: str, sampling: SamplingParams, serving: ServingAdapter | None
    ) -> GenerateRequest:
        """Raises `ConfigurationError` for a chat without a template."""
        tokenizer = None if serving is None else serving.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        if self.chat is False or (self.chat is None and template is None):
            return GenerateRequest(prompt=text, sampling=sampling)
        if tokenizer is None or template is None:
            raise ConfigurationError("this checkpoint has no chat template; use --raw")
        rendered = template.render([{"role": "user", "content": text}])
        return GenerateRequest(input_ids=tuple(tokenizer.encode_chat(rendered)), sampling=sampling)


def print_answer(items: Iterable[GenerateDelta | GenerateOutput], *, show: bool) -> None:
    """The text of one completion to stdout, and its speed to stderr."""
    clock = SystemClock()
    start_s = clock.monotonic_s()
    first_s: float | None = None
    output: GenerateOutput | None = None
    for item in items:
        first_s = clock.monotonic_s() if first_s is None else first_s
        if isinstance(item, GenerateOutput):
            output = item
        elif show:
            print(item.text or "", end="", flush=True)
    assert output is not None and first_s is not None
    if not show:
        print(output.completions[0].text or "", end="")
    print(flush=True)
    print(_speed(output, first_s - start_s, clock.monotonic_s() - start_s), file=sys.stderr)


def _speed(output: GenerateOutput, first_s: float, total_s: float) -> str:
    """Decoding speed counts the tokens after the first, over the time after the first."""
    num_tokens = len(output.completions[0].token_ids)
    decoding = f"{(num_tokens - 1) / (total_s - first_s):.1f} tokens/s" if num_tokens > 1 else "-"
    return (
        f"[{output.prompt_tokens} prompt tokens, {num_tokens} generated; first after"
        f" {first_s:.2f} s, then {decoding}]"
    )
