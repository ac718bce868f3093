"""Callers of a role's `/generate`: each sends one stream after the other and judges every answer.

The models are random and the requests greedy, so that each prompt has one answer under each of two
checkpoints. Which of them a version has, `checkpoint_of` says.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import msgspec

from phalanx.clock import Clock, SystemClock
from phalanx.testing.soak.job import SoakError

NUM_PROMPTS = 16
MAX_TOKENS = 48
_WAIT_S = 0.05


class _Meta(msgspec.Struct):
    weight_version: str
    finish_reason: dict[str, object] | None = None
    weight_versions: list[tuple[str, int]] = []


class _Chunk(msgspec.Struct):
    """A cumulative chunk of SGLang's stream, or the error that ends one."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: dict[str, object] | None = None


_chunk = msgspec.json.Decoder(_Chunk)


@dataclass
class Tally:
    """What has come of the requests. `lost`: they had started when an engine was killed.

    `mixed`: answers of more than one version, which said so.
    """

    num_answered: int = 0
    num_lost: int = 0
    num_mixed: int = 0
    num_turned_away: int = 0
    by_version: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Traffic:
    """`num_callers` of them, until `stop`."""

    def __init__(
        self,
        url: str,
        num_callers: int,
        checkpoint_of: Callable[[str], int],
        note: Callable[[str], None],
        *,
        clock: Clock | None = None,
    ) -> None:
        self.tally = Tally()
        self._killing = False
        self._killed_s = -math.inf
        self._checkpoint_of = checkpoint_of
        self._note = note
        self._clock = clock or SystemClock()
        self._num_callers = num_callers
        self._expected: dict[tuple[int, int], list[int]] = {}
        self._stopping = False
        limits = httpx.Limits(max_connections=num_callers + 8)
        self._http = httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits)

    async def learn(self, checkpoint: int) -> None:
        """What each prompt is answered while all engines have this checkpoint."""
        for prompt in range(NUM_PROMPTS):
            answer = await self._http.post("/generate", json=_payload(prompt, MAX_TOKENS))
            ids = msgspec.json.decode(answer.content, type=_Chunk).output_ids
            if len(ids) != MAX_TOKENS:
                raise SoakError(f"the answer to prompt {prompt} has {len(ids)} tokens")
            self._expected[checkpoint, prompt] = ids

    async def run(self) -> None:
        """Until every caller has ended its last request after `stop`."""
        async with asyncio.TaskGroup() as callers:
            for number in range(self._num_callers):
                callers.create_task(self._call_on(number))

    def stop(self) -> None:
        self._stopping = True

    @contextmanager
    def killing(self) -> Iterator[None]:
        """An engine is killed in here and replaced: streams that run meanwhile may be lost."""
        self._killing = True
        try:
            yield
        finally:
            self._killing, self._killed_s = False, self._clock.monotonic_s()

    async def close(self) -> None:
        await self._http.aclose()

    async def _call_on(self, number: int) -> None:
        turn = number
        while not self._stopping:
            turn += 1
            length = 8 + turn * 7 % (MAX_TOKENS - 7)
            await self._one(turn % NUM_PROMPTS, length)

    async def _one(self, prompt: int, length: int) -> None:
        """One request to its end, sent again as long as it is told that it has not started."""
        while True:
            begun_s = self._clock.monotonic_s()
            try:
                status, chunks = await self._stream(prompt, length)
            except httpx.HTTPError as error:
                self._lost(begun_s, f"{error!r} of {error.__cause__!r}")
                return
            if status == 503 and not self._stopping:
                self.tally.num_turned_away += 1
                await asyncio.sleep(_WAIT_S)
                continue
            if status == 503:
                return
            if status == 502:
                self._lost(begun_s, f"status 502: {chunks[0]!r}")
            elif status != 200:
                self.tally.faults.append(f"status {status}: {chunks[:1]!r}")
            else:
                self._judge(prompt, length, begun_s, chunks)
            return

    async def _stream(self, prompt: int, length: int) -> tuple[int, Sequence[bytes]]:
        payload = {**_payload(prompt, length), "stream": True}
        async with self._http.stream("POST", "/generate", json=payload) as answer:
            if answer.status_code != 200:
                return answer.status_code, [await answer.aread()]
            lines = [line async for line in answer.aiter_lines() if line]
            return 200, [line.removeprefix("data: ").encode() for line in lines]

    def _lost(self, begun_s: float, why: str) -> None:
        """A request that broke: right where an engine was killed meanwhile."""
        if self._killing or self._killed_s >= begun_s:
            self.tally.num_lost += 1
        else:
            ago_s = self._clock.monotonic_s() - begun_s
            self.tally.faults.append(
                f"a request was lost {ago_s:.2f} s after it was sent, though no engine was killed: {why}"
            )
            self._note(self.tally.faults[-1])

    def _judge(self, prompt: int, length: int, begun_s: float, lines: Sequence[bytes]) -> None:
        if not lines or lines[-1] != b"[DONE]" or lines.count(b"[DONE]") != 1:
            self.tally.faults.append(f"a stream ended with {lines[-1:]!r}")
            return
        chunks = [_chunk.decode(line) for line in lines[:-1]]
        last = chunks[-1] if chunks else _Chunk()
        if last.error is not None:
            self._lost(begun_s, str(last.error))
            return
        endings = [one for one in chunks if one.meta_info and one.meta_info.finish_reason]
        if len(endings) != 1 or last.meta_info is None or len(last.output_ids) != length:
            self.tally.faults.append(f"a stream of {length} tokens ended so: {last}")
            return
        self.tally.num_answered += 1
        self._check_tokens(prompt, last.output_ids, last.meta_info)

    def _check_tokens(self, prompt: int, ids: list[int], meta: _Meta) -> None:
        """Those of the first version are the ones that its checkpoint gives."""
        spans = meta.weight_versions or [(meta.weight_version, len(ids))]
        first, count = spans[0]
        self.tally.by_version[meta.weight_version] += 1
        self.tally.num_mixed += len(spans) > 1
        expected = self._expected[self._checkpoint_of(first), prompt]
        if sum(num for _, num in spans) != len(ids) or spans[-1][0] != meta.weight_version:
            self.tally.faults.append(f"{spans} do not say the versions of {len(ids)} tokens")
        elif ids[:count] != expected[:count]:
            self.tally.faults.append(
                f"prompt {prompt} under {first!r}: {ids[:count]} instead of {expected[:count]}"
            )


def _payload(prompt: int, length: int) -> Mapping[str, object]:
    ids = [10 + prompt * 17 % 380, 20 + prompt * 31 % 370, 30 + prompt % 300]
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": True},
    }
