"""What stands behind SGLang's routes in `sglang_server`: requests that run, memory that is given back
and taken again, and weights, with the assertions of SGLang 0.5.23 that end its process.

It computes nothing: tokens and log-probabilities are pseudo-random numbers of the weights, the prompt
and the position, so the same weights answer the same.
"""

from __future__ import annotations

import asyncio
import enum
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from phalanx.device_ledger import SimulatedDevice
from phalanx.errors import SimulatedOutOfMemoryError

TAGS = ("kv_cache", "weights", "cuda_graph")
GARBAGE = "garbage"
_LETTERS = 26


class SchedulerCrashedError(Exception):
    """The process of SGLang that this stands for is gone."""


class PauseMode(enum.StrEnum):
    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class Ending(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SchedulerOptions:
    """`memory_saver` False: releasing frees nothing, so weights survive it. With `weights_backup`
    they come back at once; else they are garbage until they are updated. A token takes `step_s`.
    `weights_bytes` and `kv_cache_bytes` are held of each of its simulated devices, where it has some.
    """

    model: str = "tiny"
    memory_saver: bool = True
    weights_backup: bool = False
    step_s: float = 0.0
    context_length: int = 1 << 20
    weights_bytes: int = 1 << 20
    kv_cache_bytes: int = 1 << 20


@dataclass(eq=False)
class Running:
    """One request for one answer; its tokens so far."""

    rid: str
    prompt: Sequence[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    ending: Ending | None = None
    is_waiting: bool = True
    state: int | None = None


class SGLangScheduler:
    """Belongs to one event loop. `on_crash` ends the process in which it is; where it returns, every
    later call raises `SchedulerCrashedError`.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        on_crash: Callable[[str], None],
        devices: Sequence[SimulatedDevice] = (),
    ) -> None:
        """Raises `SimulatedOutOfMemoryError` where it does not fit on its devices."""
        self.options = options
        self._devices = tuple(devices)
        self._take(TAGS)
        self.weights = options.model
        self.version = "default"
        self.paused = False
        self.released: set[str] = set()
        self.groups: set[str] = set()
        self.adapters: set[str] = set()
        self.crash: str | None = None
        self._on_crash = on_crash
        self._num_updates = 0
        self._requests: list[Running] = []
        self._changed = asyncio.Condition()

    @property
    def num_running(self) -> int:
        return sum(not request.is_waiting for request in self._requests)

    @property
    def num_waiting(self) -> int:
        return sum(request.is_waiting for request in self._requests)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def check(self) -> None:
        """Raises where the process would be gone."""
        if self.crash is not None:
            raise SchedulerCrashedError(self.crash)

    async def run(self, request: Running) -> AsyncIterator[Running]:
        """Yields the request after each of its tokens, and when it is aborted."""
        self.check()
        await self._until(lambda: self._num_updates == 0)
        self._requests.append(request)
        try:
            while request.ending is None:
                if self.paused:
                    await self._until(lambda: not self.paused or request.ending is not None)
                    continue
                request.is_waiting = False
                await asyncio.sleep(self.options.step_s)
                if self.paused or request.ending is not None:
                    continue
                self._step(request)
                yield request
            if request.ending is Ending.ABORT:
                yield request
        finally:
            self._requests.remove(request)
            await self._notify()

    async def abort(self, prefix: str, *, everything: bool = False) -> None:
        """End the requests whose id begins so; an empty id without `everything` is ignored."""
        self.check()
        for request in self._requests:
            if request.ending is None and (
                everything or (prefix and request.rid.startswith(prefix))
            ):
                request.ending = Ending.ABORT
        await self._notify()

    async def pause(self, mode: PauseMode) -> None:
        """With `abort`, end everything and return when nothing runs; new requests are held."""
        self.check()
        self.paused = True
        if mode is PauseMode.ABORT:
            before = tuple(self._requests)
            await self.abort("", everything=True)
            await self._until(lambda: not any(request in self._requests for request in before))
        elif mode is PauseMode.RETRACT:
            for request in self._requests:
                request.is_waiting = True

    async def go_on(self) -> None:
        self.check()
        self.paused = False
        await self._notify()

    async def flush(self, timeout_s: float = 0.0) -> bool:
        """Whether it was idle, or became so in time."""
        self.check()
        if timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._until(lambda: self.is_idle)
            except TimeoutError:
                return False
        return self.is_idle

    def release(self, tags: Iterable[str]) -> None:
        """Crashes while requests run, and while they wait unless it is paused."""
        self.check()
        if self.num_running or (self.num_waiting and not self.paused):
            self._die(
                "AssertionError: release_memory_occupation should be called only when server is idle."
            )
        for tag in tags:
            self.released.add(tag)
            for device in self._devices if self.options.memory_saver else ():
                device.give(tag)
            if tag == "weights" and self.options.memory_saver and not self.options.weights_backup:
                self.weights = GARBAGE

    def resume(self, tags: Iterable[str]) -> None:
        """Crashes on a tag that is not released, and where its devices have no room."""
        self.check()
        for tag in tags:
            if tag not in self.released:
                self._die(f"KeyError: {tag!r}")
            try:
                self._take([tag])
            except SimulatedOutOfMemoryError as error:
                self._die(f"torch.OutOfMemoryError: {error}")
            self.released.remove(tag)

    def _take(self, tags: Iterable[str]) -> None:
        options = self.options
        sizes = {"weights": options.weights_bytes, "kv_cache": options.kv_cache_bytes}
        for tag in tags:
            for device in self._devices:
                device.take(tag, sizes.get(tag, 0))

    async def update(self, weights: str, version: str | None, *, abort: bool) -> bool:
        """Other weights, once nothing runs or it is paused; whether the cache could be flushed.

        They are in either way.
        """
        self.check()
        if abort:
            await self.abort("", everything=True)
        self._num_updates += 1
        try:
            await self._until(lambda: self.is_idle or self.paused)
        finally:
            self._num_updates -= 1
            await self._notify()
        self._need("weights")
        self.weights = weights
        if not self.is_idle:
            return False
        if version is not None:
            self.version = version
        return True

    def scores(self, prompt: Sequence[int]) -> list[float]:
        """The log-probability of each token of `prompt` given those before it."""
        state, scores = self._beginning(), []
        for token in prompt:
            scores.append(_score(state, token))
            state = _after(state, token)
        return scores

    def _step(self, request: Running) -> None:
        self._need(*TAGS)
        if request.max_new_tokens == 0:
            request.ending = Ending.LENGTH
            return
        if request.state is None:
            request.state = self._beginning()
            for token in request.prompt:
                request.state = _after(request.state, token)
        token = ord("a") + request.state % _LETTERS
        request.tokens.append(token)
        request.logprobs.append(_score(request.state, token))
        request.versions.append(self.version)
        request.state = _after(request.state, token)
        if token in request.stop_token_ids:
            request.ending = Ending.STOP
        elif len(request.tokens) >= request.max_new_tokens:
            request.ending = Ending.LENGTH

    def _beginning(self) -> int:
        return zlib.crc32(self.weights.encode())

    def _need(self, *tags: str) -> None:
        """A step touches what was given back: the device stops the process."""
        if self.options.memory_saver and self.released.intersection(tags):
            self._die(
                "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
            )

    def _die(self, reason: str) -> NoReturn:
        self.crash = reason
        self._on_crash(reason)
        raise SchedulerCrashedError(reason)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _after(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(8, "little"), state)


def _score(state: int, token: int) -> float:
    return -(_after(state, token) % 1000) / 250 - 0.001
