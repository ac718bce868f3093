"""A language model's request, its streamed deltas and its complete output.

Log-probabilities are natural logarithms of the model's own distribution, before temperature,
penalties and bias, in float32.
"""

from __future__ import annotations

import msgspec

from phalanx.errors import InvalidRequestError
from phalanx.schema.handoff import Handle, PublishedKV
from phalanx.schema.sampling import SamplingParams

MAX_TOP_LOGPROBS = 256
MAX_TOKEN_IDS_LOGPROB = 1024


VersionSpan = tuple[str, int]
"""A version of the weights, and how many tokens in a row it computed."""


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probabilities a request wants beside its tokens.

    `prompt_start` is the first prompt position to report (None: output tokens only). `top_k` adds
    that many most likely tokens at each reported position, `token_ids` adds the given ones.
    `token_ids_by_position` adds other ones at each position of the prompt: one row for each of them
    from `prompt_start` on, all equally long, the first of which is not looked at where nothing
    precedes it.
    """

    prompt_start: int | None = None
    top_k: int = 0
    token_ids: tuple[int, ...] = ()
    token_ids_by_position: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.token_ids_by_position:
            self._check_rows()
        if self.prompt_start is not None and self.prompt_start < 0:
            raise InvalidRequestError(
                f"prompt_start={self.prompt_start} must be at least 0", field="logprob_start_len"
            )
        if not 0 <= self.top_k <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                f"top_k={self.top_k} must be from 0 to {MAX_TOP_LOGPROBS}",
                field="top_logprobs_num",
            )
        if len(self.token_ids) > MAX_TOKEN_IDS_LOGPROB:
            raise InvalidRequestError(
                f"token_ids has {len(self.token_ids)} entries; at most {MAX_TOKEN_IDS_LOGPROB} "
                "are allowed",
                field="token_ids_logprob",
            )
        if any(token_id < 0 for token_id in self.token_ids):
            raise InvalidRequestError("token ids must not be negative", field="token_ids_logprob")

    def _check_rows(self) -> None:
        rows, field = self.token_ids_by_position, "token_ids_logprob_by_position"
        if self.token_ids or self.prompt_start is None:
            raise InvalidRequestError(
                "token ids by position need logprob_start_len, and no token_ids_logprob beside them",
                field=field,
            )
        width = len(rows[0])
        if not 1 <= width <= MAX_TOP_LOGPROBS or any(len(row) != width for row in rows):
            lengths = sorted({len(row) for row in rows})
            raise InvalidRequestError(
                f"the rows have {', '.join(map(str, lengths[:8]))} token ids; all must have the same"
                f" number, from 1 to {MAX_TOP_LOGPROBS}",
                field=field,
            )

    @property
    def selects(self) -> bool:
        """Whether tokens were chosen, here or there."""
        return bool(self.token_ids or self.token_ids_by_position)

    def selected_at(self, position: int) -> tuple[int, ...]:
        """The tokens that were chosen at a position of the prompt."""
        if not self.token_ids_by_position:
            return self.token_ids
        return self.token_ids_by_position[position - (self.prompt_start or 0)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as text or as token ids (exactly one of them), and what to do with it.

    `priority`: larger runs earlier; equal ones in order of arrival. `detokenize=False` leaves the
    text of deltas and output None, for a caller that decodes the token ids itself; stop strings
    and stop expressions need it True.

    With `hands_over` the prompt and one token are computed, and the output's `handoff` is what an
    equal request takes on another engine, to go on from there: its output is then what one engine
    would have answered, but without log-probabilities of the prompt. What is held for it is held
    for a limited time.
    """

    prompt: str | None = None
    input_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    logprobs: LogprobOptions | None = None
    priority: int = 0
    detokenize: bool = True
    hands_over: bool = False
    handoff: Handoff | None = None

    def __post_init__(self) -> None:
        if self.hands_over and self.handoff is not None:
            raise InvalidRequestError(
                "a request that goes on from a handoff cannot hand over again", field="hands_over"
            )
        if self.handoff is not None and len(self.handoff.sequences) != self.sampling.n:
            raise InvalidRequestError(
                f"handoff has {len(self.handoff.sequences)} completions and n={self.sampling.n}; "
                "give the request that was handed over",
                field="handoff",
            )
        if (self.prompt is None) == (self.input_ids is None):
            raise InvalidRequestError("give exactly one of prompt and input_ids", field="prompt")
        if self.prompt is not None:
            _check_text("prompt", self.prompt)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(
                f"priority={self.priority!r} must be an integer", field="priority"
            )
        if not (self.prompt or self.input_ids):
            raise InvalidRequestError(
                "the prompt is empty; give at least one token",
                field="prompt" if self.input_ids is None else "input_ids",
            )
        needs_text = self.sampling.stop or self.sampling.stop_regex
        if needs_text and not self.detokenize:
            raise InvalidRequestError(
                "stop strings and stop expressions need detokenize=True", field="detokenize"
            )


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field}={value!r} must be a string", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field} is not text that UTF-8 can hold: {error}", field=field
        ) from None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Ended by a stop token (its id), a stop string or expression (its text), or a grammar's end."""

    matched: int | str | None = None


class Length(msgspec.Struct, frozen=True, tag="length"):
    """Ended by the token limit `length`."""

    length: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ended by a cancel or a pause; the tokens so far are kept."""

    message: str = "aborted"


FinishReason = Stop | Length | Abort

TokenScore = tuple[float, int]
"""(log-probability, token id)."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of consecutive tokens; all fields given have the same length.

    Entry i scores token i given everything before it; it is None for a prompt's first token, which
    nothing precedes. `top` and `selected` hold (log-probability, token id) pairs at each position,
    the former sorted by descending probability, the latter in the order asked for.
    """

    token_ids: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()
    top: tuple[tuple[TokenScore, ...] | None, ...] | None = None
    selected: tuple[tuple[TokenScore, ...] | None, ...] | None = None

    def extended(self, later: TokenLogprobs) -> TokenLogprobs:
        """These followed by `later`."""
        return TokenLogprobs(
            token_ids=self.token_ids + later.token_ids,
            values=self.values + later.values,
            top=None if self.top is None or later.top is None else self.top + later.top,
            selected=(
                None
                if self.selected is None or later.selected is None
                else self.selected + later.selected
            ),
        )


class SequenceHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """One completion as far as it was computed.

    `output_ids` were sampled with `seed` and have the log-probabilities `logprobs`, where those
    were asked for. Without `kv` there is nothing to read: the completion has ended. `cached_tokens`
    of the prompt were taken from a cache. `weight_versions` are those of `output_ids`.
    """

    seed: int
    output_ids: tuple[int, ...]
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    kv: PublishedKV | None = None
    positions: dict[str, int] = {}
    weight_versions: tuple[VersionSpan, ...] = ()


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose prompt of `num_prompt_tokens` tokens another engine has computed."""

    num_prompt_tokens: int
    sequences: tuple[SequenceHandoff, ...]

    def handles(self) -> tuple[Handle, ...]:
        """Everything that is held for it."""
        return tuple(
            handle for one in self.sequences if one.kv is not None for handle in one.kv.handles()
        )

    def at_host(self, host: str) -> Handoff:
        """This, read at `host` where its owner listens on every address of its machine."""
        sequences = tuple(
            one if one.kv is None else msgspec.structs.replace(one, kv=one.kv.at_host(host))
            for one in self.sequences
        )
        return msgspec.structs.replace(self, sequences=sequences)


class GenerateDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What completion `index` gained since the previous delta.

    `text` never splits a character and is None without detokenization. `prompt_logprobs` comes
    once, with the first delta of completion 0. `finish_reason` is set on a completion's last delta.
    `weight_versions` tells which weights computed its tokens.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    weight_versions: tuple[VersionSpan, ...] = ()

    def merged(self, later: GenerateDelta) -> GenerateDelta | None:
        """Both as one delta, or None where they belong to different completions."""
        if self.index != later.index:
            return None
        text = None if self.text is None and later.text is None else _joined(self.text, later.text)
        logprobs = self.logprobs
        if logprobs is None:
            logprobs = later.logprobs
        elif later.logprobs is not None:
            logprobs = logprobs.extended(later.logprobs)
        return GenerateDelta(
            index=self.index,
            token_ids=self.token_ids + later.token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            finish_reason=later.finish_reason,
            weight_versions=_joined_spans(self.weight_versions, later.weight_versions),
        )


def _joined_spans(
    first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...]
) -> tuple[VersionSpan, ...]:
    if not first or not second or first[-1][0] != second[0][0]:
        return first + second
    return (*first[:-1], (first[-1][0], first[-1][1] + second[0][1]), *second[1:])


def _joined(first: str | None, second: str | None) -> str:
    return (first or "") + (second or "")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One whole completion: all its token ids (a stop token included), its text, why it ended.

    `weight_versions` says which weights computed its tokens, in their order: one span where they
    were not updated meanwhile. Two neighbouring spans of the same name are an update whose caller
    gave no version.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None = None
    weight_versions: tuple[VersionSpan, ...] = ()


class GenerateOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The complete answer to a `GenerateRequest`: `sampling.n` completions of one prompt.

    `cached_tokens` of the prompt were taken from a cache; `num_retractions` counts how often the
    request was pushed back and computed again, for want of memory or for new weights.
    `weight_version` is that of the weights when the request ended, or of its last token; the
    completions tell of each token. `handoff` is there for a request that `hands_over`.
    """

    completions: tuple[Completion, ...]
    prompt_tokens: int
    cached_tokens: int = 0
    num_retractions: int = 0
    prompt_logprobs: TokenLogprobs | None = None
    weight_version: str = "default"
    handoff: Handoff | None = None

    @property
    def weight_versions(self) -> tuple[VersionSpan, ...]:
        """Which weights computed the tokens of the first completion."""
        return self.completions[0].weight_versions
