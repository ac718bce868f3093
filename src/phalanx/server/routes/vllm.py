"""vLLM's names for sleep, pause and weights, which SkyRL, prime-rl, TRL and OpenRLHF call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidRequestError, PhalanxError
from phalanx.schema.control import ALL_TAGS, MemoryTag, PauseMode
from phalanx.server.answering import Answering
from phalanx.server.dialects import SGLANG
from phalanx.server.operations.generation import GenerationOperations
from phalanx.server.operations.memory import MemoryOperations
from phalanx.server.operations.weights import WeightOperations
from phalanx.wire.vllm import control as wire
from phalanx.wire.vllm.control import PauseKind, Query

Endpoint = Callable[[Request], Awaitable[Response]]
Work = Callable[[Query, bytes], Awaitable[dict[str, object]]]
_ONLY_NCCL = (
    "vLLM's own weight transfer runs over NCCL between GPUs, which this server does not join; use "
    '/update_weights with {"weight_dir": ...}, or a torch group: /init_weights_update_group and '
    "/update_weights_from_distributed"
)


class VllmRoutes:
    """Everything may be repeated; every answer is JSON, where vLLM's own is often empty."""

    def __init__(
        self,
        generation: GenerationOperations,
        memory: MemoryOperations,
        weights: WeightOperations,
        answering: Answering,
    ) -> None:
        self._generation = generation
        self._memory = memory
        self._weights = weights
        self._answering = answering
        self._paused_to_sleep = False
        self._group = wire.SKYRL_GROUP

    def posts(self) -> dict[str, Endpoint]:
        """What takes POST, by path."""
        works: dict[str, Work] = {
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/update_weights": self._update_weights,
            "/start_weight_update": self._start_update,
            "/finish_weight_update": self._finish_update,
            "/finalize_weight_update": self._finish_update,
            "/init_weight_update_communicator": self._join,
            "/init_weight_transfer": self._join,
            "/init_weight_transfer_engine": self._only_nccl,
        }
        return {path: self._endpoint(work) for path, work in works.items()}

    def gets(self) -> dict[str, Endpoint]:
        """What takes GET, by path."""
        works: dict[str, Work] = {
            "/is_sleeping": self._is_sleeping,
            "/is_paused": self._is_paused,
            "/get_world_size": self._world_size,
        }
        return {path: self._endpoint(work) for path, work in works.items()}

    def _endpoint(self, work: Work) -> Endpoint:
        async def answer(request: Request) -> Response:
            query = request.query_params.multi_items()

            async def answered(body: bytes) -> Response:
                encoded = msgspec.json.encode(await work(query, body))
                return Response(encoded, media_type="application/json")

            return await self._answering.control(request, SGLANG, answered)

        return answer

    async def _sleep(self, query: Query, body: bytes) -> dict[str, object]:
        wanted = wire.parse_sleep(query, body)
        had_paused = self._generation.paused
        try:
            if not had_paused:
                # Noted first: whoever asked may leave while the pause goes on, and ask again.
                self._paused_to_sleep = True
                await self._pause_as(wanted.kind)
            # Only now: weights may have come while running requests were waited for.
            tags = frozenset() if wanted.level == 0 else wanted.tags or self._of_level(wanted.level)
            if tags:
                await self._memory.release(tags)
        except PhalanxError:
            if not had_paused:
                await self._go_on()
            raise
        return {"status": "sleeping", "asleep": sorted(self._memory.state.asleep)}

    def _of_level(self, level: int) -> frozenset[MemoryTag]:
        """Level 1 promises the same weights after waking: those of a trainer stay in memory."""
        keeps = level == 1 and self._weights.replaced
        return ALL_TAGS - {MemoryTag.WEIGHTS} if keeps else ALL_TAGS

    async def _wake_up(self, query: Query, body: bytes) -> dict[str, object]:
        await self._memory.resume(wire.parse_wake(query, body))
        memory = self._memory.state
        if self._paused_to_sleep and not memory.asleep:
            await self._go_on()
        return {
            "status": "sleeping" if memory.asleep else "awake",
            "asleep": sorted(memory.asleep),
            "waiting_for_weights": memory.waiting_for_weights,
        }

    async def _is_sleeping(self, query: Query, body: bytes) -> dict[str, object]:
        return {"is_sleeping": bool(self._memory.state.asleep)}

    async def _pause(self, query: Query, body: bytes) -> dict[str, object]:
        wanted = wire.parse_pause(query, body)
        self._paused_to_sleep = False
        await self._pause_as(wanted.kind)
        if wanted.clear_cache and wanted.kind is not PauseKind.KEEP:
            await self._generation.flush()
        return {"status": "paused", "message": "Generation paused successfully."}

    async def _resume(self, query: Query, body: bytes) -> dict[str, object]:
        await self._go_on()
        return {"status": "resumed", "message": "Generation continued successfully."}

    async def _is_paused(self, query: Query, body: bytes) -> dict[str, object]:
        return {"is_paused": self._generation.paused}

    async def _reset_prefix_cache(self, query: Query, body: bytes) -> dict[str, object]:
        flushed = await self._generation.flush()
        message = "Cache flushed." if flushed else "Cache not flushed: requests are running."
        return {"success": flushed, "message": message}

    async def _world_size(self, query: Query, body: bytes) -> dict[str, object]:
        of_one = wire.flag(query, "include_dp") is False
        return {"world_size": self._weights.num_ranks if of_one else self._weights.world_size}

    async def _update_weights(self, query: Query, body: bytes) -> dict[str, object]:
        self._weights.check_dynamic()
        wanted = wire.parse_update(body)
        if wanted.weight_dir is not None:
            await self._weights.load(wanted.weight_dir, wanted.weight_version)
        elif wanted.names is not None:
            await self._weights.receive(wanted.received(self._group))
        elif wanted.update_info is not None:
            raise InvalidRequestError(_ONLY_NCCL, field="update_info")
        else:
            raise InvalidRequestError(
                "weight_dir is null: weights by a broadcast over NCCL are not taken here; write "
                "them to a directory and give its path",
                field="weight_dir",
            )
        return {"status": "ok", "success": True, "message": "Weights updated."}

    async def _start_update(self, query: Query, body: bytes) -> dict[str, object]:
        await self._weights.begin()
        return {"status": "ok", "message": "Requests wait until the update is finished."}

    async def _finish_update(self, query: Query, body: bytes) -> dict[str, object]:
        await self._weights.end(None)
        return {"status": "ok", "message": "The update is finished."}

    async def _join(self, query: Query, body: bytes) -> dict[str, object]:
        op = wire.parse_join(body).op()
        await self._weights.join(op)
        self._group = op.group_name
        return {"status": "ok", "message": f"The group {op.group_name!r} is joined."}

    async def _only_nccl(self, query: Query, body: bytes) -> dict[str, object]:
        self._weights.check_dynamic()
        raise InvalidRequestError(_ONLY_NCCL)

    async def _pause_as(self, kind: PauseKind) -> None:
        if kind is PauseKind.WAIT:
            await self._generation.pause_when_idle()
        else:
            abort = kind is PauseKind.ABORT
            await self._generation.pause(PauseMode.ABORT if abort else PauseMode.IN_PLACE)

    async def _go_on(self) -> None:
        self._paused_to_sleep = False
        await self._generation.go_on()
