"""A toy language model behind a real socket, in the form of SGLang's `/generate` and of chats, and a
role of such engines. Its distribution is a pure function of its name and of the tokens before.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.settings import Mode
from tests.client.roles.servers import FakeEngine, FakeGateway, Request, model

VOCABULARY = 24
END = 0


def log_probs(name: str, prefix: list[int]) -> np.ndarray:
    """float32 [VOCABULARY]."""
    seed = zlib.crc32(f"{name} {prefix}".encode())
    logits = np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)
    return logits - np.logaddexp.reduce(logits)


class ToyEngine(FakeEngine):
    """`knows`: how it takes chosen ids: `by_position`, `flat` or (by neither) only one list for all.

    `spoil` may change an answer before it is sent. `cuts`: so many rollouts are cut off after
    `cut_length` tokens. Weights are the model's name, in a file `weights`. `packed` answers columns in base64.
    """

    def __init__(
        self, name: str = "toy", *, version: str = "1", knows: str = "by_position"
    ) -> None:
        super().__init__(f"{name}/0", self._answer)
        self.name = name
        self.version = version
        self.knows = knows
        self.packed = False
        self.updates: list[str] = []
        self.cuts = 0
        self.cut_length = 2
        self.spoil: Callable[[dict, dict], None] = lambda asked, answer: None
        self.refusal: Callable[[Request], bool] = lambda request: False
        self.says: Callable[[list[dict]], str] = lambda messages: "8"

    @property
    def asked(self) -> list[dict]:
        """Of `/generate` and of chats."""
        skipped = "/update_weights_from_disk"
        return [
            request.json
            for request in self.requests
            if request.method == "POST" and request.path != skipped
        ]

    async def _answer(self, request: Request) -> None:
        if self.refusal(request):
            return
        asked = request.json
        if request.path == "/update_weights_from_disk":
            self.name = _read(Path(asked["model_path"], "weights"))
            self.version = asked["weight_version"]
            self.updates.append(self.version)
            request.answer({"success": True})
            return
        if request.path == "/v1/chat/completions":
            said = self.says(asked["messages"])
            request.answer({"choices": [{"message": {"content": said}}]})
            return
        if asked.get("token_ids_logprob_by_position") and self.knows == "refuses":
            error = {"message": "unknown", "param": "token_ids_logprob_by_position"}
            request.answer({"error": error}, 400)
            return
        scores = asked["sampling_params"]["max_new_tokens"] == 0
        answer = self._scored(asked) if scores else self._sampled(asked)
        self.spoil(asked, answer)
        request.answer(answer)

    def _scored(self, asked: dict) -> dict:
        ids, start = asked["input_ids"], asked["logprob_start_len"]
        values: list[list] = [[None, ids[start], None]]
        tops: list[list | None] = [None]
        chosen: list[list | None] = [None]
        rows = self._chosen_rows(asked, len(ids) - start)
        for at in range(start + 1, len(ids)):
            scores = log_probs(self.name, ids[:at])
            values.append([float(scores[ids[at]]), ids[at], None])
            best = np.argsort(-scores)[: asked.get("top_logprobs_num", 0)]
            tops.append([[float(scores[one]), int(one), None] for one in best])
            if rows is not None:
                chosen.append([[float(scores[one]), one, None] for one in rows[at - start]])
        meta = self._meta(asked, "length", 0)
        meta["input_token_logprobs"] = values
        if "top_logprobs_num" in asked:
            meta["input_top_logprobs"] = tops
        if rows is not None:
            meta["input_token_ids_logprobs"] = chosen
        if self.packed:
            _pack(meta)
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _chosen_rows(self, asked: dict, count: int) -> list[list[int]] | None:
        by_position = asked.get("token_ids_logprob_by_position")
        flat = asked.get("token_ids_logprob")
        if by_position and self.knows == "by_position":
            return by_position
        if flat and self.knows == "flat":
            width = len(flat) // count
            return [flat[row * width : (row + 1) * width] for row in range(count)]
        return [flat] * count if flat else None

    def _sampled(self, asked: dict) -> dict:
        sampling = asked["sampling_params"]
        prompt = asked.get("input_ids") or [1 + byte % 20 for byte in asked["text"].encode()]
        limit, reason = sampling["max_new_tokens"], "length"
        if self.cuts:
            self.cuts -= 1
            limit, reason = min(limit, self.cut_length), "abort"
        ids: list[int] = []
        values, tops = [], []
        for offset in range(limit):
            scores = log_probs(self.name, prompt + ids)
            random = np.random.default_rng([sampling["sampling_seed"], offset])
            token = int(random.choice(VOCABULARY, p=np.exp(scores) / np.exp(scores).sum()))
            ids.append(token)
            values.append([float(scores[token]), token, None])
            best = np.argsort(-scores)[: asked.get("top_logprobs_num", 0)]
            tops.append([[float(scores[one]), int(one), None] for one in best])
            if token == END:
                reason = "stop"
                break
        meta = self._meta(asked, reason, len(ids))
        meta |= {"output_token_logprobs": values, "output_top_logprobs": tops}
        meta["weight_versions"] = [[self.version, len(ids)]] if ids else []
        answer = {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}
        if asked.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = prompt
        return answer

    def _meta(self, asked: dict, reason: str, count: int) -> dict:
        return {
            "id": "1",
            "finish_reason": {"type": reason, "length": count},
            "prompt_tokens": 1,
            "completion_tokens": count,
            "weight_version": self.version,
        }


def _read(path: Path) -> str:
    return path.read_text()


def _pack(meta: dict) -> None:
    """Columns as base64, the first row filled with zeros."""
    for name in [one for one in meta if one.startswith("input_")]:
        rows = meta.pop(name)
        wide = [[row] if name == "input_token_logprobs" else row for row in rows[1:]]
        width = len(wide[0]) if wide else 1
        table = [[[0.0, 0, None]] * width, *wide]
        values = np.array([[entry[0] for entry in row] for row in table], "<f4")
        ids = np.array([[entry[1] for entry in row] for row in table], "<i4")
        meta[f"{name}_val_b64"] = base64.b64encode(values.tobytes()).decode()
        meta[f"{name}_idx_b64"] = base64.b64encode(ids.tobytes()).decode()


@asynccontextmanager
async def engine(name: str = "toy", **options):
    """One engine, and its client."""
    toy = ToyEngine(name, **options)
    await toy.start()
    try:
        async with AsyncRoleClient(toy.url) as client:
            yield toy, client
    finally:
        await toy.stop()


@asynccontextmanager
async def role(name: str = "toy", mode: Mode = "auto", **options):
    """One engine behind a gateway that knows it by discovery and passes messages on to it."""
    toy = ToyEngine(name, **options)
    gateway = FakeGateway()
    await toy.start()
    await gateway.start()

    async def forward(request: Request) -> None:
        request.target = request.path.removeprefix("/teacher")
        toy.requests.append(request)
        if "messages" in request.json and request.path == "/generate":
            request.answer({"response": toy.says(request.json["messages"])})
        else:
            await toy.behave(request)

    gateway.forward = forward
    gateway.show(model(name, toy.replica()))
    try:
        async with AsyncRoleClient(gateway.role_url, mode=mode) as client:
            yield toy, client, gateway
    finally:
        await gateway.stop()
        await toy.stop()
