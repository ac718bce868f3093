"""Log-probabilities of one sequence, gathered step by step from what the node computed."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.schema.generate import LogprobOptions, TokenLogprobs, TokenScore
from phalanx.step.outputs import HostRow


class _Entries:
    """Growing lists that become one `TokenLogprobs`."""

    def __init__(self, options: LogprobOptions) -> None:
        self._options = options
        self.token_ids: list[int] = []
        self.values: list[float | None] = []
        self.top: list[tuple[TokenScore, ...] | None] = []
        self.selected: list[tuple[TokenScore, ...] | None] = []

    def add_unscored(self, token: int) -> None:
        self.token_ids.append(token)
        self.values.append(None)
        self.top.append(None)
        self.selected.append(None)

    def add(
        self,
        token: int,
        value: float,
        top: tuple[Any, Any],
        selected: tuple[list[float], tuple[int, ...]],
    ) -> None:
        """`top` and `selected` are (log-probabilities, ids)."""
        self.token_ids.append(token)
        self.values.append(value)
        self.top.append(tuple(zip(*top, strict=True)))
        self.selected.append(tuple(zip(*selected, strict=True)))

    def extend(self, logprobs: TokenLogprobs) -> None:
        nothing: tuple[None, ...] = (None,) * len(logprobs.token_ids)
        self.token_ids.extend(logprobs.token_ids)
        self.values.extend(logprobs.values)
        self.top.extend(nothing if logprobs.top is None else logprobs.top)
        self.selected.extend(nothing if logprobs.selected is None else logprobs.selected)

    def since(self, start: int) -> TokenLogprobs:
        return TokenLogprobs(
            token_ids=tuple(self.token_ids[start:]),
            values=tuple(self.values[start:]),
            top=tuple(self.top[start:]) if self._options.top_k else None,
            selected=tuple(self.selected[start:]) if self._options.selects else None,
        )


class LogprobRecord:
    """What a request asked for and has got so far; prompt entries survive a push-back."""

    @classmethod
    def resumed(
        cls, options: LogprobOptions | None, prompt_length: int, output: TokenLogprobs | None
    ) -> LogprobRecord:
        """Of a request whose prompt was scored elsewhere, and so far its `output`."""
        if options is not None:
            options = msgspec.structs.replace(options, prompt_start=None)
        record = cls(options, prompt_length)
        if options is not None and output is not None:
            record._output.extend(output)
        return record

    def __init__(self, options: LogprobOptions | None, prompt_length: int) -> None:
        self.options = options
        self._prompt_length = prompt_length
        start = None if options is None else options.prompt_start
        self.next_prompt = prompt_length if start is None else start
        """The first prompt position that is wanted and not yet scored."""
        self._wants_prompt = start is not None
        entries = _Entries(options or LogprobOptions())
        self._output, self._prompt = entries, _Entries(options or LogprobOptions())
        self._num_reported = 0
        self._prompt_reported = False

    @property
    def num_unscored(self) -> int | None:
        """The first tokens whose logits score no position that is still wanted; None for all."""
        if self.next_prompt >= self._prompt_length:
            return None
        return max(0, self.next_prompt - 1)

    def wanted_positions(self, start: int, end: int) -> tuple[int, int]:
        """Prompt positions that a step over tokens `start` to `end` scores, as a range.

        The logits of token i score the token behind it, so that a step scores up to its own end.
        """
        first = max(self.next_prompt, start + 1)
        return first, max(first, min(end + 1, self._prompt_length))

    def take_prompt(self, outputs: HostRow) -> None:
        """Scores of consecutive prompt positions from `next_prompt` on (position 0 has none)."""
        ids = outputs.get("prompt_ids")
        if ids is None:
            return
        options, first = self.options, outputs["prompt_first"]
        assert options is not None
        for row, token in enumerate(ids):
            if row == 0 and first == 0:
                self._prompt.add_unscored(token)
                continue
            at = row - (1 if first == 0 else 0)
            self._prompt.add(
                token,
                outputs["prompt_scores"][at],
                (outputs["prompt_top_values"][at], outputs["prompt_top_ids"][at]),
                (outputs["prompt_selected"][at], options.selected_at(first + row)),
            )
        self.next_prompt = first + len(ids)

    def take_output(self, outputs: HostRow, token: int) -> None:
        if self.options is None:
            return
        top = (outputs["top_values"], outputs["top_ids"])
        selected = (outputs["selected"], self.options.token_ids)
        self._output.add(token, outputs["score"], top, selected)

    def take_output_delta(self) -> TokenLogprobs | None:
        if self.options is None:
            return None
        start, self._num_reported = self._num_reported, len(self._output.token_ids)
        return self._output.since(start)

    def take_prompt_delta(self) -> TokenLogprobs | None:
        if self._prompt_reported:
            return None
        self._prompt_reported = True
        return self.prompt

    @property
    def output(self) -> TokenLogprobs | None:
        return None if self.options is None else self._output.since(0)

    @property
    def prompt(self) -> TokenLogprobs | None:
        return self._prompt.since(0) if self._wants_prompt else None
