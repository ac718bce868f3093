"""What makes a request impossible, whatever else is running; needs neither weights nor tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm.grammar import check_grammar
from phalanx.processing.text import compile_stop_regex
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.limits import Limits


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """Refuse what can be seen before the prompt's text is tokenized."""
    if request.input_ids is not None:
        _check_ids("input_ids", request.input_ids, limits)
        check_prompt(len(request.input_ids), request, limits)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, limits)
    _check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias], limits)
    if request.logprobs is not None:
        _check_ids("token_ids_logprob", request.logprobs.token_ids, limits)
        for row in request.logprobs.token_ids_by_position:
            _check_ids("token_ids_logprob_by_position", row, limits)
    for one in () if request.handoff is None else request.handoff.sequences:
        _check_ids("handoff", one.output_ids, limits)
    compile_stop_regex(request.sampling.stop_regex)
    check_grammar(request.sampling)


def check_prompt(length: int, request: GenerateRequest, limits: Limits) -> None:
    """Refuse a prompt of `length` tokens that is too long for what is asked of it, or too short."""
    if length == 0:
        raise InvalidRequestError("the prompt has no tokens", field="prompt")
    longest = limits.context_length
    if longest is not None and length + request.sampling.max_new_tokens > longest:
        raise InvalidRequestError(
            f"the prompt's {length} tokens and max_new_tokens={request.sampling.max_new_tokens} "
            f"exceed the {longest} tokens that one request may have; shorten the prompt or ask "
            "for fewer",
            field="max_new_tokens" if length < longest else "prompt",
        )
    start = None if request.logprobs is None else request.logprobs.prompt_start
    if start is not None and start > length:
        raise InvalidRequestError(
            f"logprob_start_len={start} is behind the prompt's {length} tokens; "
            f"allowed are 0 to {length}",
            field="logprob_start_len",
        )
    rows = 0 if request.logprobs is None else len(request.logprobs.token_ids_by_position)
    if rows and rows != length - (start or 0):
        raise InvalidRequestError(
            f"token_ids_logprob_by_position has {rows} rows; the prompt's {length} tokens have"
            f" {length - (start or 0)} positions from logprob_start_len={start} on",
            field="token_ids_logprob_by_position",
        )


def _check_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    if not ids:
        return
    vocab_size = limits.vocab_size
    assert vocab_size is not None
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{field} holds {token!r}; token ids are integers from 0 to {vocab_size - 1}",
                field=field,
            )
