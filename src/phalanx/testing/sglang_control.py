"""The control routes of `sglang_server`: health and information, pausing, memory and weights."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from phalanx.testing.sglang_answers import BadRequestError
from phalanx.testing.sglang_scheduler import TAGS, PauseMode, SGLangScheduler
from phalanx.testing.sglang_text import json_object

Body = Mapping[str, Any]
Outcome = tuple[bool, str]
_BOTH = ["GET", "POST"]
_NUM_LAYER_WEIGHTS = 8


class SGLangControl:
    """Controls the scheduler. `args` are the server's, by their names there."""

    def __init__(self, scheduler: SGLangScheduler, args: Mapping[str, object]) -> None:
        self._scheduler = scheduler
        self._args = dict(args)
        self._snapshot: str | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/health", self._health),
            Route("/ready", self._health),
            Route("/ping", self._health),
            Route("/model_info", self._model_info),
            Route("/get_model_info", self._model_info),
            Route("/server_info", self._server_info),
            Route("/get_server_info", self._server_info),
            Route("/v1/loads", self._loads),
            Route("/flush_cache", self._flush, methods=_BOTH),
            Route("/abort_request", self._told(self._abort), methods=["POST"]),
            Route("/pause_generation", self._told(self._pause), methods=["POST"]),
            Route("/continue_generation", self._told(self._go_on), methods=["POST"]),
            Route("/release_memory_occupation", self._told(self._release), methods=_BOTH),
            Route("/resume_memory_occupation", self._told(self._resume), methods=_BOTH),
            *self._weight_routes(),
        ]

    def _weight_routes(self) -> list[Route]:
        updates: dict[str, Callable[[Body], Awaitable[Outcome]]] = {
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._set_version,
            "/weights_checker": self._check_weights,
            "/begin_weight_update": _accepted,
            "/end_weight_update": _accepted,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }
        routes = [
            Route(path, self._told(_outcome(update)), methods=["POST"])
            for path, update in updates.items()
        ]
        read = self._told(self._read_weight)
        return [*routes, Route("/get_weights_by_name", read, methods=_BOTH)]

    def _told(
        self, act: Callable[[Body], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            try:
                return await act(await json_object(request))
            except BadRequestError as error:
                message = {"object": "error", "message": str(error), "type": "Bad Request"}
                return JSONResponse({**message, "param": None, "code": 400}, 400)

        return route

    async def _health(self, request: Request) -> Response:
        self._scheduler.check()
        return Response()

    async def _model_info(self, request: Request) -> Response:
        self._scheduler.check()
        told = {
            "model_path": self._args["model_path"],
            "served_model_name": self._args["served_model_name"],
            "tokenizer_path": self._args["model_path"],
            "is_generation": True,
            "weight_version": self._scheduler.version,
            "load_format": self._args.get("load_format") or "auto",
            "disaggregation_mode": self._args.get("disaggregation_mode") or "null",
            "model_type": "random",
            "architectures": ["RandomForCausalLM"],
        }
        return JSONResponse(told)

    async def _server_info(self, request: Request) -> Response:
        self._scheduler.check()
        state = {"last_gen_throughput": 0.0, "memory_usage": {"weight": 0.0, "kvcache": 0.0}}
        return JSONResponse({**self._args, "internal_states": [state], "version": "0.5.23"})

    async def _loads(self, request: Request) -> Response:
        self._scheduler.check()
        load = {
            "dp_rank": 0,
            "num_running_reqs": self._scheduler.num_running,
            "num_waiting_reqs": self._scheduler.num_waiting,
        }
        return JSONResponse({"version": "0.5.23", "dp_rank_count": 1, "loads": [load]})

    async def _flush(self, request: Request) -> Response:
        if await self._scheduler.flush(float(request.query_params.get("timeout", 0))):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running or waiting.\n", 400)

    async def _abort(self, body: Body) -> Response:
        everything = bool(body.get("abort_all"))
        await self._scheduler.abort(str(body.get("rid") or ""), everything=everything)
        return Response(b"")

    async def _pause(self, body: Body) -> Response:
        mode = body.get("mode", PauseMode.ABORT.value)
        if mode not in {one.value for one in PauseMode}:
            raise BadRequestError(f"mode: Input should be 'abort', 'retract' or 'in_place': {mode}")
        await self._scheduler.pause(PauseMode(mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _go_on(self, body: Body) -> Response:
        await self._scheduler.go_on()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _release(self, body: Body) -> Response:
        self._scheduler.release(_tags(body))
        return JSONResponse(None)

    async def _resume(self, body: Body) -> Response:
        self._scheduler.resume(_tags(body))
        return JSONResponse(None)

    async def _from_disk(self, body: Body) -> Outcome:
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise BadRequestError("model_path: Field required")
        return await self._update(path, body)

    async def _from_tensor(self, body: Body) -> Outcome:
        tensors = body.get("serialized_named_tensors")
        if not isinstance(tensors, list) or not tensors:
            raise BadRequestError("serialized_named_tensors: Field required")
        return await self._update(f"tensors:{zlib.crc32(repr(tensors).encode())}", body)

    async def _from_distributed(self, body: Body) -> Outcome:
        group = body.get("group_name", "weight_update_group")
        if group not in self._scheduler.groups:
            return False, f"The group {group} to update weights is not initialized."
        return await self._update(f"distributed:{body.get('names')}", body)

    async def _update(self, weights: str, body: Body) -> Outcome:
        version = body.get("weight_version")
        abort = bool(body.get("abort_all_requests"))
        flushed = await self._scheduler.update(weights, version, abort=abort)
        if flushed or not body.get("flush_cache", True):
            return True, "Succeeded to update model weights."
        return False, "Weights are updated, but the cache flush failed: requests are running."

    async def _init_group(self, body: Body) -> Outcome:
        self._scheduler.groups.add(body.get("group_name", "weight_update_group"))
        return True, "Succeeded to initialize custom process group."

    async def _destroy_group(self, body: Body) -> Outcome:
        group = body.get("group_name", "weight_update_group")
        if group not in self._scheduler.groups:
            return False, "The group to be destroyed does not exist."
        self._scheduler.groups.remove(group)
        return True, "Succeeded to destroy custom process group."

    async def _set_version(self, body: Body) -> Outcome:
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequestError("new_version: Field required")
        if body.get("abort_all_requests", True):
            await self._scheduler.abort("", everything=True)
        self._scheduler.version = version
        return True, f"Weight version updated to {version}"

    async def _check_weights(self, body: Body) -> Outcome:
        weights = self._scheduler.weights
        match body.get("action"):
            case "snapshot":
                self._snapshot = weights
            case "reset_tensors":
                self._scheduler.weights = f"noise:{weights}"
            case "compare" if self._snapshot != weights:
                return False, "Tensor mismatch"
            case "compare" | "checksum":
                pass
            case action:
                return False, f"Unsupported action={action!r}"
        return True, "Success."

    async def _load_adapter(self, body: Body) -> Outcome:
        self._scheduler.adapters.add(str(body.get("lora_name")))
        return True, "LoRA adapter loaded."

    async def _unload_adapter(self, body: Body) -> Outcome:
        name = str(body.get("lora_name"))
        if name not in self._scheduler.adapters:
            return False, f"LoRA adapter with name {name} is not loaded."
        self._scheduler.adapters.remove(name)
        return True, "LoRA adapter unloaded."

    async def _read_weight(self, body: Body) -> Response:
        name, limit = body.get("name"), int(body.get("truncate_size", 100))
        if not isinstance(name, str) or not name:
            raise BadRequestError("Get parameter by name failed")
        seed = zlib.crc32(f"{self._scheduler.weights}:{name}".encode())
        numbers = [((seed >> at) % 100) / 100 for at in range(min(limit, _NUM_LAYER_WEIGHTS))]
        return JSONResponse([numbers])


def _outcome(
    update: Callable[[Body], Awaitable[Outcome]],
) -> Callable[[Body], Awaitable[Response]]:
    async def act(body: Body) -> Response:
        success, message = await update(body)
        told = {"success": success, "message": message, "num_paused_requests": 0}
        return JSONResponse(told, 200 if success else 400)

    return act


async def _accepted(body: Body) -> Outcome:
    return True, "Success."


def _tags(body: Body) -> list[str]:
    """Those asked for; all of them for null and for none."""
    tags = body.get("tags") or list(TAGS)
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        raise BadRequestError(f"unknown tags {unknown}; known: {list(TAGS)}")
    return list(tags)
