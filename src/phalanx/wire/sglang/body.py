"""The fields of SGLang's `/generate` body, names and types as SGLang 0.5.23 has them."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.wire.bootstrap import Hosts, Numbers

Ids = list[int | list[int]]
"""Token ids of one prompt, or of several."""


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`; null means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    custom_params: Any = None
    stream_interval: Any = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/generate`. Fields typed Any are known and not supported, see `UNSUPPORTED`."""

    text: str | list[str] | None = None
    input_ids: Ids | None = None
    sampling_params: SamplingBody | list[SamplingBody | None] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    # This project's own: a list of ids for each position of a prompt from logprob_start_len on.
    token_ids_logprob_by_position: list[list[int | list[int]] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    priority: int | list[int | None] | None = None
    model: str | None = None
    bootstrap_host: Hosts = None
    bootstrap_port: Numbers = None
    bootstrap_room: Numbers = None
    # Accepted without effect: they steer caches, routing or logs that a lone server does not have.
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    session_id: str | None = None
    routing_key: str | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    custom_labels: dict[str, str] | None = None
    # Known and not supported.
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    lora_path: Any = None
    lora_id: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    routed_experts_start_len: Any = None
    return_sampling_mask: Any = None
    return_flat_raw_top_logprobs: Any = None
    return_flat_raw_top_logprobs_b64: Any = None
    return_flat_raw_output_top_logprobs: Any = None
    bootstrap_pair_key: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    custom_logit_processor: Any = None
    background: Any = None
    conversation_id: Any = None
    require_reasoning: Any = None
    return_bytes: Any = None
    return_entropy: Any = None


UNSUPPORTED = GenerateBody.__struct_fields__[GenerateBody.__struct_fields__.index("input_embeds") :]
UNSUPPORTED_SAMPLING = ("structural_tag", "custom_params", "stream_interval")
NEUTRAL: dict[str, tuple[object, ...]] = {
    "routed_experts_start_len": (0, -1),
    "routed_dp_rank": (0,),
    "data_parallel_rank": (0,),
    "stream_interval": (1,),
}
