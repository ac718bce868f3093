"""What the frameworks that speak SGLang's wire send, from the sources of each, and what they read."""

from __future__ import annotations

from tests.server.callers.call import Call, get, length

PROMPT = [5, 6, 7, 8]
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "ignore_eos": True}
TRIPLE = length(3)
DONE = {"message": str, "status": "ok"}
UPDATED = {"success": True, "message": str}
OUTPUT = {
    "text": str,
    "output_ids": length(6),
    "meta_info.finish_reason.type": "length",
    "meta_info.output_token_logprobs": length(6),
    "meta_info.output_token_logprobs.0": TRIPLE,
    "meta_info.output_token_logprobs.0.0": float,
    "meta_info.output_token_logprobs.0.1": int,
}

RELAX = [
    get("/health_generate"),
    get("/get_weight_version", reads={"weight_version": str}),
    get("/get_server_info", reads={"tp_size": 1, "disaggregation_mode": "null"}),
    Call(
        "/generate",  # GenRM
        {
            "input_ids": PROMPT,
            "sampling_params": {
                "temperature": 0.2,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": 6,
                "ignore_eos": True,
            },
        },
        reads={"text": str, "meta_info.finish_reason.type": "length"},
    ),
    Call(
        "/generate",  # the teacher's prefill of on-policy distillation
        {
            "input_ids": PROMPT + [9, 10],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 0,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": 3,
            "top_logprobs_num": 2,
            "token_ids_logprob": [11, 12, 13],
        },
        reads={
            "meta_info.input_token_logprobs": length(3),
            "meta_info.input_token_logprobs.0.0": None,
            "meta_info.input_token_logprobs.1.0": float,
            "meta_info.input_token_logprobs.2.1": 10,
            "meta_info.input_top_logprobs.1": length(2),
            "meta_info.input_token_ids_logprobs.1": length(3),
            "meta_info.input_token_ids_logprobs.1.0.1": 11,
            "meta_info.finish_reason": {"type": "length", "length": 0},
            "output_ids": [],
        },
    ),
    Call("/pause_generation", {"mode": "abort"}, reads=DONE),
    Call("/abort_request", {"rid": "", "abort_all": True}),
    get("/flush_cache"),
    Call("/release_memory_occupation", {}, reads={"": None}),
    Call("/resume_memory_occupation", {"tags": ["weights"]}, reads={"": None}),
    Call(
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["{tensors}"],
            "load_format": "safetensors",
            "flush_cache": True,
            "weight_version": "2",
        },
        reads=UPDATED,
    ),
    Call("/post_process_weights", {"post_process_quantization": True}, reads=UPDATED),
    Call("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, reads={"": None}),
    Call("/continue_generation", {}, reads=DONE),
    Call("/weights_checker", {"action": "checksum"}, reads=UPDATED),
    Call("/destroy_weights_update_group", {"group_name": "relax"}, reads=UPDATED),
    Call(
        "/load_lora_adapter",
        {"lora_name": "a", "lora_path": "/nowhere"},
        status=400,
        reads={"success": False, "error_message": str},
    ),
    Call("/unload_lora_adapter", {"lora_name": "a"}, status=400, reads={"success": False}),
    get("/get_weight_version", reads={"weight_version": "2"}),
]

SLIME = [
    get("/health_generate"),
    get("/get_server_info", reads={"tp_size": 1, "pp_size": 1, "disaggregation_mode": "null"}),
    get("/server_info", reads={"tp_size": 1}),
    Call(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": 6,
                "stop": None,
                "stop_token_ids": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
                "sampling_seed": 42,
                "ignore_eos": True,
            },
            "return_logprob": True,
        },
        headers={"X-SMG-Routing-Key": "session-1"},
        reads={
            **OUTPUT,
            "meta_info.weight_version": str,
            "meta_info.prompt_tokens": 4,
            "meta_info.completion_tokens": 6,
            "meta_info.cached_tokens": int,
        },
    ),
    get(
        "/v1/loads?include=core",
        reads={"loads.0.num_running_reqs": 0, "loads.0.num_waiting_reqs": 0},
    ),
    Call("/abort_request", {"abort_all": True}),
    Call("/pause_generation", {}, reads=DONE),
    get("/flush_cache"),
    Call("/release_memory_occupation", {}, reads={"": None}),
    Call("/resume_memory_occupation", {"tags": ["weights"]}, reads={"": None}),
    Call(
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["{tensors}"],
            "load_format": "safetensors",
            "flush_cache": False,
            "weight_version": "1",
        },
        reads=UPDATED,
    ),
    Call("/resume_memory_occupation", {"tags": ["cuda_graph"]}, reads={"": None}),
    Call("/resume_memory_occupation", {"tags": ["kv_cache"]}, reads={"": None}),
    Call("/continue_generation", {}, reads=DONE),
    Call("/weights_checker", {"action": "snapshot"}, reads=UPDATED),
    Call("/weights_checker", {"action": "compare"}, reads=UPDATED),
    get("/get_weight_version", reads={"weight_version": "1"}),
]

VERL = [
    get("/v1/models", reads={"data.0.id": "policy"}),
    get("/health_generate"),
    Call(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {**WHOLE, "n": 1, "repetition_penalty": 1.0},
            "return_logprob": True,
            "image_data": None,
        },
        reads=OUTPUT,
    ),
    Call(
        "/generate",  # a teacher scores a prompt
        {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 4,
        },
        reads={
            "meta_info.input_token_logprobs": length(4),
            "meta_info.input_top_logprobs.3": length(4),
        },
    ),
    Call(
        "/generate",
        {"text": "Hello", "sampling_params": WHOLE, "return_logprob": False},
        reads={"text": str, "output_ids": length(6)},
    ),
    Call("/abort_request", {"rid": "", "abort_all": True}),
    get("/flush_cache"),
    Call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, reads={"": None}),
    Call("/resume_memory_occupation", {"tags": ["weights"]}, reads={"": None}),
    Call(
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["{pickled}"],
            "load_format": None,
            "flush_cache": False,
        },
        reads=UPDATED,
    ),
    Call("/resume_memory_occupation", {"tags": ["kv_cache"]}, reads={"": None}),
    Call("/generate", {"input_ids": PROMPT, "sampling_params": WHOLE}, reads={"output_ids": list}),
]

AREAL = [
    get("/health"),
    Call(
        "/generate",
        {
            "input_ids": PROMPT,
            "image_data": None,
            "sampling_params": {
                "top_p": 1.0,
                "top_k": 100000000,
                "max_new_tokens": 6,
                "temperature": 1.0,
                "stop_token_ids": [2],
                "frequency_penalty": 0.0,
                "ignore_eos": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "stream": False,
        },
        reads={
            "meta_info.output_token_logprobs.0.0": float,
            "meta_info.output_token_logprobs.0.1": int,
            "meta_info.finish_reason.type": str,
        },
    ),
    Call("/pause_generation"),
    Call(
        "/update_weights_from_disk",
        {"model_path": "{directory}", "abort_all_request": True},
        reads=UPDATED,
    ),
    Call("/continue_generation"),
    Call(
        "/init_weights_update_group",
        {
            "master_address": "127.0.0.1",
            "master_port": "29500",
            "rank_offset": 1,
            "world_size": 2,
            "backend": "nccl",
            "group_name": "areal",
        },
        status=400,  # there is no GPU; with gloo it works, see test_weight_routes.py
        reads={"success": False, "message": lambda text: "gloo" in text},
    ),
    Call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    Call("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}),
    Call("/update_weights_from_disk", {"model_path": "{directory}"}, reads=UPDATED),
]

NEMO_RL = [
    get("/health_generate"),
    Call(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {**WHOLE, "stop_token_ids": None, "no_stop_trim": True},
            "return_logprob": True,
            "stream": False,
        },
        reads=OUTPUT,
    ),
    Call("/pause_generation", {"mode": "retract"}, reads=DONE),
    Call("/flush_cache"),
    Call("/begin_weight_update", {}, reads=UPDATED),
    Call(
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["{tensors}"],
            "load_format": "safetensors",
            "flush_cache": False,
        },
        reads=UPDATED,
    ),
    Call("/end_weight_update", {}, reads=UPDATED),
    Call("/continue_generation", {}, reads=DONE),
    Call("/release_memory_occupation", {"tags": ["kv_cache"]}),
    Call("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    Call("/abort_request", {"rid": "", "abort_all": True}),
    Call("/generate", {"input_ids": PROMPT, "sampling_params": WHOLE}, reads={"output_ids": list}),
]
