"""Weights, as SGLang's routes take and tell of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidRequestError
from phalanx.schema.control import WeightReport
from phalanx.server.answering import Answering, Work
from phalanx.server.dialects import SGLANG, WEIGHTS
from phalanx.server.operations.tensors import sent_tensors
from phalanx.server.operations.weights import WeightOperations
from phalanx.wire.sglang import weights as wire

Endpoint = Callable[[Request], Awaitable[Response]]


class WeightRoutes:
    """Updates answer when the weights are in. `bulky` reads the bodies that bring weights."""

    def __init__(self, weights: WeightOperations, answering: Answering, bulky: Answering) -> None:
        self._weights = weights
        self._answering = answering
        self._bulky = bulky

    def endpoints(self) -> dict[str, Endpoint]:
        """By path; all of them take POST."""
        small: dict[str, Work] = {
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weight_version": self._rename,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/post_process_weights": self._post_process,
            "/weights_checker": self._check,
            "/update_weights_from_ipc": self._not_by_handle,
            "/init_weights_send_group_for_remote_instance": self._not_sent,
            "/send_weights_to_remote_instance": self._not_sent,
            "/load_lora_adapter": self._no_lora,
            "/load_lora_adapter_from_tensors": self._no_lora,
            "/unload_lora_adapter": self._no_lora,
            "/v1/load_lora_adapter": self._no_lora,
            "/v1/unload_lora_adapter": self._no_lora,
        }
        return {path: self._endpoint(work) for path, work in small.items()}

    def _endpoint(self, work: Work) -> Endpoint:
        async def answer(request: Request) -> Response:
            return await self._answering.control(request, WEIGHTS, work)

        return answer

    async def from_tensor(self, request: Request) -> Response:
        # What refuses them need not read gigabytes first.
        answering = self._bulky if self._weights.dynamic else self._answering
        return await answering.control(request, WEIGHTS, self._from_tensor)

    async def by_name(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._by_name)

    async def _from_disk(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        wanted = wire.parse_disk(body)
        num_paused = self._weights.num_paused
        await self._weights.load(wanted.model_path, wanted.version, abort=wanted.abort_all_requests)
        return _json(
            wire.result_body(
                f"Weights loaded from {wanted.model_path}.", num_paused_requests=num_paused
            )
        )

    async def _from_tensor(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        wanted, tensors = await asyncio.to_thread(self._sent, body)
        await self._weights.replace(tensors, wanted.version, abort=wanted.abort_all_requests)
        return _done(f"{len(tensors)} weights replaced.")

    def _sent(self, body: bytes) -> tuple[wire.TensorBody, Mapping[str, torch.Tensor]]:
        wanted = wire.parse_tensor(body)
        return wanted, sent_tensors(wanted, self._weights.num_ranks)

    async def _from_distributed(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        wanted = wire.parse_distributed(body)
        op = wanted.op()
        await self._weights.receive(op, abort=wanted.abort_all_requests)
        return _done(f"{len(op.names)} weights received from the group {op.group_name!r}.")

    async def _join(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        op = wire.parse_join(body).op()
        await self._weights.join(op)
        return _done(f"The group {op.group_name!r} is joined.")

    async def _leave(self, body: bytes) -> Response:
        op = wire.parse_leave(body).op()
        await self._weights.leave(op)
        return _done(f"The group {op.group_name!r} is left.")

    async def _rename(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        wanted = wire.parse_version(body)
        await self._weights.rename(wanted.version, abort=wanted.abort_all_requests)
        return _json(
            wire.result_body(
                f"Weight version updated to {wanted.version}", new_version=wanted.version
            )
        )

    async def _begin(self, body: bytes) -> Response:
        await self._weights.begin()
        return _done("Updates until /end_weight_update belong together; requests wait.")

    async def _end(self, body: bytes) -> Response:
        had_begun = await self._weights.end(wire.parse_end(body).version)
        return _done("The update is complete." if had_begun else "No update had begun.")

    async def _post_process(self, body: bytes) -> Response:
        # What is derived from weights here is made with every update.
        self._weights.check_dynamic()
        return _done("Nothing is left to do.")

    async def _check(self, body: bytes) -> Response:
        action = wire.parse_check(body).action
        reports = await self._weights.check(action)
        differing = sorted({name for one in reports for name in one.differing or ()})
        if differing:
            shown = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
            message = f"{len(differing)} weights differ from the snapshot: {shown}"
            body = wire.result_body(message, success=False, payload=_payload(reports, differing))
            return Response(body, 400, media_type="application/json")
        return _json(wire.result_body("Success.", payload=_payload(reports, differing)))

    async def _by_name(self, body: bytes) -> Response:
        wanted = wire.parse_named_weight(body)
        values = await self._weights.read(wanted.name, wanted.rows)
        return _json(msgspec.json.encode(values))

    async def _not_by_handle(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        raise InvalidRequestError(
            "weights by handles of another process's memory are not taken here; use "
            "/update_weights_from_disk, _from_tensor or _from_distributed"
        )

    async def _not_sent(self, body: bytes) -> Response:
        raise InvalidRequestError(
            "this server does not send its weights to others; have them load the same checkpoint, "
            "or update each from the trainer"
        )

    async def _no_lora(self, body: bytes) -> Response:
        self._weights.check_dynamic()
        raise InvalidRequestError(
            "LoRA adapters are not served here; merge the adapter into the weights and use "
            "/update_weights_from_disk"
        )


def _payload(reports: list[WeightReport], differing: list[str]) -> dict[str, object]:
    checksums = [one.checksum for one in reports]
    return {"checksum": checksums[0], "checksums": checksums, "differing": differing}


def _done(message: str) -> Response:
    return _json(wire.result_body(message))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
