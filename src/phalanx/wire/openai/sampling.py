"""The fields that chat completions and completions share, and what they mean for sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.sampling import SamplingParams
from phalanx.wire.body import refuse_unsupported
from phalanx.wire.bootstrap import Bootstrap, Hosts, Numbers, bootstraps
from phalanx.wire.openai.structured import ResponseFormat, StructuredOutputs, grammar_fields
from phalanx.wire.sampling import bias_pairs, string_tuple


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both routes: OpenAI's, then SGLang's and vLLM's extras; null means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    sampling_seed: int | None = None
    rid: str | None = None
    priority: int | None = None
    bootstrap_host: Hosts = None
    bootstrap_port: Numbers = None
    bootstrap_room: Numbers = None
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None
    # Accepted without effect: they label, route or cache.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    routing_key: str | None = None
    # Known and not supported.
    lora_path: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_cached_tokens_details: Any = None
    return_sampling_mask: Any = None
    data_parallel_rank: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    structural_tag: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None


UNSUPPORTED = SharedBody.__struct_fields__[SharedBody.__struct_fields__.index("lora_path") :]
NEUTRAL: dict[str, tuple[object, ...]] = {"data_parallel_rank": (0,), "length_penalty": (1.0,)}
INPUT_IDS_HEADER = "x-sglext-return-input-ids"
OUTPUT_IDS_HEADER = "x-sglext-return-output-ids"


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer holds beyond OpenAI's fields."""

    token_ids: bool = False
    prompt_token_ids: bool = False
    meta_info: bool = False
    sglext_input_ids: bool = False
    sglext_output_ids: bool = False

    @property
    def any(self) -> bool:
        return self != Extras()


def extras(body: SharedBody) -> Extras:
    """The extras that `body` asks for; refused together with a stream."""
    wanted = Extras(
        token_ids=bool(body.return_token_ids),
        # vLLM tells the prompt's with them.
        prompt_token_ids=bool(body.return_prompt_token_ids or body.return_token_ids),
        meta_info=bool(body.return_meta_info),
        sglext_input_ids=bool(body.return_input_ids_in_sglext),
        sglext_output_ids=bool(body.return_output_ids_in_sglext),
    )
    return _checked(wanted, stream=bool(body.stream))


def extras_with_headers(wanted: Extras, headers: Mapping[str, str], *, stream: bool) -> Extras:
    """`wanted`, and what the request's headers ask for."""
    asked = msgspec.structs.replace(
        wanted,
        sglext_input_ids=wanted.sglext_input_ids or headers.get(INPUT_IDS_HEADER) == "1",
        sglext_output_ids=wanted.sglext_output_ids or headers.get(OUTPUT_IDS_HEADER) == "1",
    )
    return _checked(asked, stream=stream)


def _checked(wanted: Extras, *, stream: bool) -> Extras:
    if stream and wanted.any:
        raise InvalidRequestError(
            "return_token_ids, return_prompt_token_ids, return_meta_info and the sglext fields "
            "are not available in a stream; send stream=false",
            field="stream",
        )
    return wanted


def check_shared(body: SharedBody) -> None:
    """Refuse what is known and not served."""
    fields = msgspec.structs.asdict(body)
    refuse_unsupported({name: fields[name] for name in UNSUPPORTED}, NEUTRAL)
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream=true", field="stream_options"
            )
        if body.stream_options.continuous_usage_stats:
            raise MalformedRequestError(
                "stream_options.continuous_usage_stats is not supported; use include_usage",
                field="stream_options.continuous_usage_stats",
            )


def body_bootstraps(body: SharedBody, count: int) -> list[Bootstrap | None]:
    """How a router pairs each of `count` prompts."""
    return bootstraps(body.bootstrap_host, body.bootstrap_port, body.bootstrap_room, count)


def shared_names(body: SharedBody) -> dict[str, str]:
    """The client's names for the schema's fields, as far as both routes have the same."""
    return {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "sampling_seed" if body.seed is None else "seed",
    }


def include_usage(body: SharedBody) -> bool:
    """Whether the stream ends with a chunk of usage."""
    return bool(body.stream_options and body.stream_options.include_usage)


def sampling_params(body: SharedBody, max_new_tokens: int) -> SamplingParams:
    """The sampling that `body` asks for."""
    own = {"json_schema": body.json_schema, "regex": body.regex, "ebnf": body.ebnf}
    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        # vLLM's 0 keeps all, as -1 does.
        "top_k": -1 if body.top_k == 0 else body.top_k,
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "n": body.n,
        "stop": None if body.stop is None else string_tuple(body.stop),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "stop_regex": None if body.stop_regex is None else string_tuple(body.stop_regex),
        "ignore_eos": body.ignore_eos,
        "no_stop_trim": body.no_stop_trim or body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "logit_bias": None if body.logit_bias is None else bias_pairs(body.logit_bias),
        "sampling_seed": body.sampling_seed if body.seed is None else body.seed,
        **grammar_fields(own, body.response_format, body.structured_outputs),
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
