"""What the frameworks that speak vLLM's dialect send, from the sources of each, and what they read."""

from __future__ import annotations

import base64

import numpy as np

from tests.server.callers.call import Call, get, length

PROMPT = [5, 6, 7, 8]
ASK = [{"role": "user", "content": "Hello"}]


def by_id(token: object) -> bool:
    return isinstance(token, str) and token.startswith("token_id:")


def of_float32(num_bytes: int):
    def check(text: object) -> bool:
        data = base64.b64decode(str(text))
        return len(data) == num_bytes and bool(np.isfinite(np.frombuffer(data, "<f4")).all())

    return check


SKYRL = [
    Call(
        "/v1/completions",
        {
            "model": "policy",
            "prompt": [PROMPT, [9, 10]],
            "max_tokens": 6,
            "min_tokens": 0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 1,
            "repetition_penalty": 1.0,
            "skip_special_tokens": True,
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "stop": None,
        },
        headers={"X-Session-ID": "7"},
        reads={
            "choices": length(2),
            "choices.0.index": 0,
            "choices.0.text": str,
            "choices.1.finish_reason": "length",
            "choices.1.logprobs.token_logprobs": length(6),
        },
    ),
    Call(
        "/v1/chat/completions",
        {"model": "policy", "messages": ASK, "max_tokens": 4, "temperature": 0.0},
        reads={"choices.0.message.content": str, "choices.0.finish_reason": str},
    ),
    Call(
        "/tokenize",
        {"model": "policy", "prompt": "Hello", "add_special_tokens": False},
        reads={"tokens": list},
    ),
    Call("/detokenize", {"model": "policy", "tokens": PROMPT}, reads={"prompt": str}),
    get("/get_world_size", reads={"world_size": 1}),
    Call("/pause", {"wait_for_inflight_request": False}, reads={"status": "paused"}),
    Call("/resume", {}, reads={"status": "resumed"}),
    Call("/reset_prefix_cache", {"reset_running_requests": False}, reads={"success": True}),
    Call("/sleep", {"level": 2, "tags": ["kv_cache"]}, reads={"status": "sleeping"}),
    Call("/sleep", {"level": 2}, reads={"status": "sleeping"}),
    get("/is_sleeping", reads={"is_sleeping": True}),
    Call("/wake_up", {"tags": ["weights"]}, reads={"status": "sleeping"}),
    Call(
        "/init_weight_update_communicator",
        {
            "override_existing_receiver": True,
            "master_addr": "127.0.0.1",
            "master_port": 29501,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "skyrl",
            "backend": "nccl",
            "model_dtype_str": "bfloat16",
        },
        status=400,  # there is no GPU; with gloo it works
        reads={"error.message": lambda text: "gloo" in text},
    ),
    Call("/update_weights", {"weight_dir": "{directory}"}, reads={"status": "ok"}),
    Call("/wake_up", {"tags": ["kv_cache"]}, reads={"status": "awake"}),
    Call(
        "/v1/completions",
        {"model": "policy", "prompt": [PROMPT], "max_tokens": 2},
        reads={"choices": length(1)},
    ),
]

PRIME_RL = [
    get("/health"),
    get("/v1/models", reads={"data.0.id": "policy"}),
    Call(
        "/v1/chat/completions",
        {
            "model": "policy",
            "messages": ASK,
            "max_completion_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "return_token_ids": True,
            "cache_salt": "3",
            "ignore_eos": True,
        },
        headers={"X-data-parallel-rank": "0"},
        reads={
            "prompt_token_ids": list,
            "choices.0.token_ids": length(6),
            "choices.0.logprobs.content": length(6),
            "choices.0.logprobs.content.0.logprob": float,
            "choices.0.finish_reason": "length",
            "usage.completion_tokens": 6,
        },
    ),
    Call("/pause?mode=keep&clear_cache=false", reads={"status": "paused"}),
    Call("/update_weights", {"weight_dir": "{directory}"}, reads={"success": True}),
    Call("/resume", reads={"status": "resumed"}),
    Call("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, status=400),
    Call("/v1/unload_lora_adapter", {"lora_name": "a"}, status=400),
    Call("/init_broadcaster", {"host": "127.0.0.1", "port": 1}, status=404),  # told apart by it
]

SAMPLING = {
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 6,
    "ignore_eos": True,
}
TRL = [
    get("/health"),
    get("/v1/models", reads={"data.0.id": "policy"}),
    get("/get_world_size", reads={"world_size": 1}),
    Call(
        "/v1/completions",
        {
            "model": "policy",
            "prompt": [PROMPT, [9, 10]],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **SAMPLING,
            "logprobs": 0,
        },
        reads={
            "choices": length(4),
            "choices.0.prompt_token_ids": PROMPT,
            "choices.2.prompt_token_ids": [9, 10],
            "choices.1.token_ids": length(6),
            "choices.0.logprobs.tokens.0": by_id,
            "choices.0.logprobs.token_logprobs.0": float,
            "choices.0.logprobs.top_logprobs": length(6),
            "choices.0.logprobs.top_logprobs.0": lambda row: all(map(by_id, row)) and len(row) == 1,
        },
    ),
    Call(
        "/v1/chat/completions",
        {
            "model": "policy",
            "messages": ASK,
            **SAMPLING,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False},
        },
        reads={
            "prompt_token_ids": list,
            "choices.1.token_ids": length(6),
            "choices.1.logprobs.content.0.token": by_id,
            "choices.1.logprobs.content.0.top_logprobs.1.token": by_id,
        },
    ),
    Call(
        "/v1/completions",
        {
            "model": "policy",
            "prompt": [PROMPT, [9, 10, 11]],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 3,
        },
        reads={
            "choices.0.prompt_logprobs": length(4),
            "choices.0.prompt_logprobs.0": None,
            "choices.1.prompt_logprobs": length(3),
            "choices.1.prompt_logprobs.1": lambda row: "10" in row and 3 <= len(row) <= 4,
            "choices.1.prompt_logprobs.1.10.logprob": float,
            "choices.1.prompt_logprobs.1.10.rank": int,
            "choices.1.prompt_logprobs.1.10.decoded_token": str,
            "choices.0.logprobs": None,
        },
    ),
    Call(
        "/init_weight_transfer_engine",
        {
            "init_info": {
                "master_address": "127.0.0.1",
                "master_port": 1,
                "rank_offset": 1,
                "world_size": 2,
            }
        },
        status=400,
        reads={"error.message": lambda text: "NCCL" in text},
    ),
    Call("/start_weight_update", {}, reads={"status": "ok"}),
    Call("/finish_weight_update", {}, reads={"status": "ok"}),
    Call("/reset_prefix_cache", reads={"success": True}),
    # Its server of its own, before and after log-probabilities were lists.
    get("/health/", reads={"status": "ok"}),
    get("/get_world_size/", reads={"world_size": 1}),
    Call(
        "/generate/",
        {
            "prompts": ["Hello", "a"],
            "images": None,
            **{**SAMPLING, "top_k": -1, "ignore_eos": None},
            "truncate_prompt_tokens": None,
            "guided_decoding_regex": None,
            "generation_kwargs": {"ignore_eos": True},
        },
        reads={
            "prompt_ids": length(2),
            "completion_ids": length(4),
            "completion_ids.0": length(6),
            "logprobs.0": length(6),
            "logprobs.0.0": float,
        },
    ),
    Call(
        "/generate/",
        {
            "prompts": [PROMPT],
            **{**SAMPLING, "ignore_eos": None},
            "logprobs": 2,
            "structured_outputs_regex": None,
            "generation_kwargs": {"ignore_eos": True, "seed": 3},
        },
        reads={
            "prompt_ids": [PROMPT],
            "logprobs.0.0": lambda row: 2 <= len(row) <= 3,
            "logprob_token_ids.1.5": lambda row: all(isinstance(one, int) for one in row),
        },
    ),
    Call(
        "/chat/",
        {
            "messages": [ASK, ASK],
            **{**SAMPLING, "ignore_eos": None},
            "logprobs": 0,
            "chat_template_kwargs": {},
        },
        reads={"prompt_ids": length(2), "completion_ids": length(4), "logprobs.0.0": length(1)},
    ),
    Call(
        "/get_sequence_logprobs/",
        {
            "sequences": [PROMPT + [9, 10], PROMPT],
            "prompt_lengths": [4, 3],
            "top_logprobs": 2,
            "temperature": 1.0,
        },
        reads={
            "logprobs": length(2),
            "logprobs.0": length(2),
            "logprobs.1": length(1),
            "logprobs.0.0": lambda row: 2 <= len(row) <= 3 and row[0] >= row[1],
            "logprob_token_ids.0.1": lambda row: 10 in row,
        },
    ),
    Call(
        "/get_sequence_logprobs/",
        {
            "sequences": [PROMPT + [9, 10], PROMPT + [9, 11]],
            "prompt_lengths": [4, 4],
            "top_logprobs": 2,
            "temperature": 1.0,
            "response_format": "binary",
        },
        reads={
            "shape": [2, 2, 2],
            "completion_lengths": [2, 2],
            "logprobs_b64": of_float32(32),
            "actual_logprobs_b64": of_float32(16),
            "token_ids_b64": str,
            "actual_token_ids_b64": str,
        },
    ),
    Call("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 2}, status=400),
    Call("/update_named_param/", {"name": "a", "dtype": "torch.float32", "shape": [1]}, status=400),
    Call("/reset_prefix_cache/", reads={"message": str}),
    Call("/close_communicator/", reads={"message": str}),
]

OPENRLHF = [
    get("/health"),
    Call(
        "/v1/completions",
        {
            "model": "policy",
            "prompt": PROMPT,
            "max_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": 1,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "ignore_eos": True,
        },
        reads={"choices.0.token_ids": length(6), "choices.0.logprobs.token_logprobs": length(6)},
    ),
    Call("/reset_prefix_cache"),
    Call("/sleep?level=1"),
    Call("/wake_up?tags=weights"),
    Call("/wake_up?tags=kv_cache"),
    Call(
        "/v1/completions",
        {"model": "policy", "prompt": PROMPT, "max_tokens": 2},
        reads={"choices": list},
    ),
]
