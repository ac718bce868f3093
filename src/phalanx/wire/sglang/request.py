"""Parses `POST /generate` of SGLang into requests of the schema."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from phalanx.wire.body import BodyDecoder, refuse_unsupported
from phalanx.wire.bootstrap import Bootstrap, bootstraps
from phalanx.wire.sampling import bias_pairs, string_tuple
from phalanx.wire.sglang.body import (
    NEUTRAL,
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    GenerateBody,
    SamplingBody,
)

T = TypeVar("T")

_BY_POSITION = "token_ids_logprob_by_position"
_DECODER = BodyDecoder(GenerateBody, [SamplingBody])


class PromptCall(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a call; `rid` is None where the caller gave none."""

    request: GenerateRequest
    rid: str | None = None
    bootstrap: Bootstrap | None = None


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One `POST /generate`: a single prompt, or a batch whose answer is a list."""

    prompts: tuple[PromptCall, ...]
    batch: bool
    stream: bool
    model: str | None
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool


def parse_generate(body: bytes) -> GenerateCall:
    """The call in `body`.

    Raises `MalformedRequestError` for wrong fields and types and `InvalidRequestError` for values
    that no request may have.
    """
    parsed = _DECODER.decode(body)
    fields = msgspec.structs.asdict(parsed)
    refuse_unsupported({name: fields[name] for name in UNSUPPORTED}, NEUTRAL)
    texts, ids, batch = _prompts(parsed)
    count = len(texts if texts is not None else ids or ())
    rids = _rids(parsed.rid, count, batch)
    samplings = [
        _sampling_params(one)
        for one in _each(parsed.sampling_params, count, batch, "sampling_params")
    ]
    logprobs = _logprobs(parsed, count, batch)
    priorities = _each(parsed.priority, count, batch, "priority")
    pairings = bootstraps(
        parsed.bootstrap_host, parsed.bootstrap_port, parsed.bootstrap_room, count
    )
    prompts = tuple(
        PromptCall(
            request=GenerateRequest(
                prompt=None if texts is None else texts[at],
                input_ids=None if ids is None else ids[at],
                sampling=samplings[at],
                logprobs=logprobs[at],
                priority=priorities[at] or 0,
            ),
            rid=rids[at],
            bootstrap=pairings[at],
        )
        for at in range(count)
    )
    return GenerateCall(
        prompts=prompts,
        batch=batch,
        stream=bool(parsed.stream),
        model=parsed.model,
        return_text_in_logprobs=bool(parsed.return_text_in_logprobs),
        return_prompt_token_ids=bool(parsed.return_prompt_token_ids),
    )


def _prompts(
    body: GenerateBody,
) -> tuple[list[str] | None, list[tuple[int, ...]] | None, bool]:
    """Texts or ids of all prompts, and whether they came as a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise MalformedRequestError("give exactly one of text and input_ids", field="text")
    if isinstance(body.text, str):
        return [body.text], None, False
    if body.text is not None:
        return _not_empty(body.text, "text"), None, True
    assert body.input_ids is not None
    if body.input_ids and all(isinstance(one, list) for one in body.input_ids):
        return None, [tuple(one) for one in body.input_ids if isinstance(one, list)], True
    ids = tuple(one for one in body.input_ids if isinstance(one, int))
    if len(ids) != len(body.input_ids):
        raise MalformedRequestError(
            "input_ids mixes token ids and lists; give one list of ids, or a list of such lists",
            field="input_ids",
        )
    return None, [ids], False


def _not_empty(values: list[str], name: str) -> list[str]:
    if not values:
        raise InvalidRequestError(f"{name} is an empty list; give at least one prompt", field=name)
    return values


def _rids(rid: str | list[str] | None, count: int, batch: bool) -> list[str | None]:
    if rid is None:
        return [None] * count
    if isinstance(rid, str):
        if not rid:
            raise InvalidRequestError("rid is empty; give a name or leave it out", field="rid")
        return [f"{rid}_{at}" for at in range(count)] if batch else [rid]
    rids = [one for one in _listed(rid, count, batch, "rid") if one]
    if len(rids) != count or len(set(rids)) != count:
        raise InvalidRequestError("the entries of rid must be distinct and not empty", field="rid")
    return list(rids)


def _each(
    value: T | list[T] | list[T | None] | None, count: int, batch: bool, name: str
) -> list[T | None]:
    """One value for each prompt, from one for all or a list of them."""
    if isinstance(value, list):
        return list(_listed(value, count, batch, name))
    return [value] * count


def _listed(values: list[T], count: int, batch: bool, name: str) -> list[T]:
    if not batch:
        raise MalformedRequestError(
            f"{name} is a list, but there is a single prompt; give one value", field=name
        )
    if len(values) != count:
        raise MalformedRequestError(
            f"{name} has {len(values)} entries for {count} prompts", field=name
        )
    return values


def _sampling_params(body: SamplingBody | None) -> SamplingParams:
    """Refusals name the field as the whole body has it."""
    try:
        return sampling_params(body)
    except InvalidRequestError as error:
        error.field = f"sampling_params.{error.field}" if error.field else "sampling_params"
        raise


def sampling_params(body: SamplingBody | None) -> SamplingParams:
    """What `sampling_params` asks for. Raises `InvalidRequestError` naming the field in it."""
    if body is None:
        return SamplingParams()
    given = {name: one for name, one in msgspec.structs.asdict(body).items() if one is not None}
    refuse_unsupported({name: given.pop(name, None) for name in UNSUPPORTED_SAMPLING}, NEUTRAL)
    for name in ("stop", "stop_regex"):
        if name in given:
            given[name] = string_tuple(given[name])
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    if "logit_bias" in given:
        given["logit_bias"] = bias_pairs(given["logit_bias"])
    return SamplingParams(**given)


def _logprobs(body: GenerateBody, count: int, batch: bool) -> list[LogprobOptions | None]:
    wanted = _each(body.return_logprob, count, batch, "return_logprob")
    starts = _each(body.logprob_start_len, count, batch, "logprob_start_len")
    tops = _each(body.top_logprobs_num, count, batch, "top_logprobs_num")
    selected = _selected(body.token_ids_logprob, count, batch)
    by_position = _by_position(body.token_ids_logprob_by_position, count, batch)
    options: list[LogprobOptions | None] = []
    given = zip(wanted, starts, tops, selected, by_position, strict=True)
    for want, start, top, ids, rows in given:
        if not want:
            options.append(None)
            continue
        prompt_start = None if start is None or start == -1 else start
        options.append(
            LogprobOptions(
                prompt_start=prompt_start,
                top_k=top or 0,
                token_ids=tuple(ids or ()),
                token_ids_by_position=rows,
            )
        )
    return options


def _selected(
    value: list[int | list[int] | None] | None, count: int, batch: bool
) -> list[list[int] | None]:
    if value is None:
        return [None] * count
    ids = [one for one in value if isinstance(one, int)]
    if len(ids) == len(value):
        return [ids] * count
    lists = [one for one in value if not isinstance(one, int)]
    if len(lists) != len(value):
        raise MalformedRequestError(
            "token_ids_logprob mixes token ids and lists; give one list of ids, or one list for "
            "each prompt",
            field="token_ids_logprob",
        )
    return _each(lists, count, batch, "token_ids_logprob")


def _by_position(
    value: list[list[int | list[int]] | None] | None, count: int, batch: bool
) -> list[tuple[tuple[int, ...], ...]]:
    """The rows of each prompt; none where it has none."""
    if value is None:
        return [()] * count
    if not batch:
        return [tuple(_row(row) for row in value)]
    each = _listed(value, count, batch, _BY_POSITION)
    return [tuple(_row(row) for row in rows or ()) for rows in each]


def _row(row: list[int | list[int]] | int | list[int] | None) -> tuple[int, ...]:
    ids = [one for one in row if isinstance(one, int)] if isinstance(row, list) else []
    if not isinstance(row, list) or len(ids) != len(row):
        raise MalformedRequestError(
            f"{_BY_POSITION} holds {row!r:.40} where the ids of one position are expected; give a list"
            " of ids for each position, or such lists for each prompt of a batch",
            field=_BY_POSITION,
        )
    return tuple(ids)
