"""Requests that score tokens which exist already, and what their answers say: the form of SGLang's
`/generate` with no new tokens.

An answer scores the token before the response too, without a value; that entry is dropped. Entries
of other tokens than those that were asked for, values that are not finite and lists of another
length are errors: nothing is filled in.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from phalanx.client.roles.answers import JsonObject
from phalanx.distill.token_table import IdArray, ScoreArray, TokenTable
from phalanx.errors import ScoresMisalignedError

MAX_IDS = 1024
"""Token ids that one request may ask for at every position."""
BY_POSITION = "token_ids_logprob_by_position"
_OWN = "input_token_logprobs"
_CHOSEN = "input_token_ids_logprobs"
_LOWEST = -3.0e38
"""Stands for minus infinity, which a teacher with masked tokens may answer."""


class ChosenIds(enum.StrEnum):
    """How a server is asked for chosen tokens that differ from position to position.

    `by_position`: a list for each position, which this project's servers take. `flat`: all lists in
    a row, with as many zeros before them as one has, for servers that read it like that. `union`:
    every id at every position, which any server takes; of its answer most is thrown away. `auto`:
    by position, and the union at servers that do not know the field.
    """

    AUTO = "auto"
    BY_POSITION = "by_position"
    FLAT = "flat"
    UNION = "union"


@dataclass(frozen=True)
class Prefill:
    """What is asked: the scores of `response_ids` behind `prompt_ids`, of the `top_k` likeliest tokens
    at each of them, and of those of `chosen` (int32 [response, k]).
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    top_k: int = 0
    chosen: IdArray | None = None

    def payload(self, how: ChosenIds = ChosenIds.BY_POSITION) -> JsonObject:
        """One request. The union has to fit into one: see `parts`."""
        payload: JsonObject = {
            "input_ids": [*self.prompt_ids, *self.response_ids],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 0,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": max(len(self.prompt_ids) - 1, 0),
        }
        if self.top_k:
            payload["top_logprobs_num"] = self.top_k
        if self.chosen is not None:
            width = self.chosen.shape[1]
            match how:
                case ChosenIds.UNION:
                    payload["token_ids_logprob"] = np.unique(self.chosen).tolist()
                case ChosenIds.FLAT:
                    payload["token_ids_logprob"] = [0] * width + self.chosen.ravel().tolist()
                case _:
                    payload[BY_POSITION] = [[0] * width, *self.chosen.tolist()]
        return payload

    def parts(self) -> list[JsonObject]:
        """As many requests as it takes where a server scores every id at every position."""
        assert self.chosen is not None
        ids = np.unique(self.chosen).tolist()
        first = self.payload(ChosenIds.UNION)
        parts = [{**first, "token_ids_logprob": ids[:MAX_IDS]}]
        later = {name: value for name, value in first.items() if name != "top_logprobs_num"}
        for start in range(MAX_IDS, len(ids), MAX_IDS):
            parts.append({**later, "token_ids_logprob": ids[start : start + MAX_IDS]})
        return parts


@dataclass(frozen=True)
class PrefillScores:
    """The answer: `log_probs` of the response, its `topk`, and those of the chosen tokens."""

    log_probs: tuple[float, ...]
    topk: TokenTable | None
    chosen: TokenTable | None
    version: str | None


def read_scores(
    asked: Prefill, answers: Sequence[Mapping[str, object]], how: ChosenIds
) -> PrefillScores:
    """What the answers to the payloads of `how` say.

    Raises `ScoresMisalignedError` for anything that is not exactly what was asked for.
    """
    metas = [_meta(answer) for answer in answers]
    versions = {_version(meta) for meta in metas}
    if len(versions) > 1:
        raise ScoresMisalignedError(
            f"the weights changed between two requests of one sample: {sorted(map(str, versions))};"
            " score it again"
        )
    length = len(asked.response_ids)
    values = _Column.read(metas[0], _OWN, length, 1)
    if values is None:
        raise ScoresMisalignedError(
            "the answer has no input_token_logprobs; the server must know return_logprob and"
            " logprob_start_len"
        )
    values.check_ids(np.asarray(asked.response_ids, dtype=np.int32)[:, None])
    topk = None
    if asked.top_k:
        topk = _Column.read(metas[0], "input_top_logprobs", length, asked.top_k)
        if topk is None:
            raise ScoresMisalignedError(
                "the answer has no input_top_logprobs, which it was asked for"
            )
    chosen = None if asked.chosen is None else _chosen(metas, asked.chosen, how)
    return PrefillScores(
        tuple(values.scores[:, 0].tolist()),
        None if topk is None else TokenTable.of_arrays(topk.ids, topk.scores),
        chosen,
        versions.pop(),
    )


def scores_of_nothing(asked: Prefill, version: str | None) -> PrefillScores:
    """Those of an empty response, which no server has to be asked about."""
    topk = TokenTable(0, asked.top_k, b"", b"") if asked.top_k else None
    width = 0 if asked.chosen is None else asked.chosen.shape[1]
    return PrefillScores((), topk, TokenTable(0, width, b"", b"") if width else None, version)


def has_chosen(answer: Mapping[str, object]) -> bool:
    """Whether the server has understood that tokens were chosen."""
    meta = _meta(answer)
    return any(meta.get(_CHOSEN + end) for end in ("", "_val_b64"))


@dataclass(frozen=True)
class _Column:
    """One field of an answer, without its first entry: ids and scores, both [rows, width]."""

    name: str
    ids: IdArray
    scores: ScoreArray

    @classmethod
    def read(cls, meta: Mapping[str, object], name: str, length: int, width: int) -> _Column | None:
        if f"{name}_val_b64" in meta:
            column = cls._packed(meta, name, length, width)
        elif name in meta:
            column = cls._listed(meta[name], name, length, width)
        else:
            return None
        if np.isnan(column.scores).any() or np.isposinf(column.scores).any():
            raise ScoresMisalignedError(f"{name} holds a value that is not finite")
        if name == _OWN and np.isneginf(column.scores).any():
            raise ScoresMisalignedError(
                f"{name} holds minus infinity: the model can never say this response"
            )
        return cls(name, column.ids, np.maximum(column.scores, np.float32(_LOWEST)))

    @classmethod
    def _packed(cls, meta: Mapping[str, object], name: str, length: int, width: int) -> _Column:
        scores = _decoded(meta, f"{name}_val_b64", "<f4")
        ids = _decoded(meta, f"{name}_idx_b64", "<i4")
        wanted = (length + 1) * width
        if len(scores) != wanted or len(ids) != wanted:
            raise _count(name, f"{len(scores)} values and {len(ids)} ids", length, width)
        return cls(
            name,
            ids.reshape(-1, width)[1:].astype(np.int32),
            scores.reshape(-1, width)[1:].astype(np.float32),
        )

    @classmethod
    def _listed(cls, rows: object, name: str, length: int, width: int) -> _Column:
        if not isinstance(rows, list) or len(rows) != length + 1:
            raise _count(name, _size(rows), length, width)
        entries = rows[1:] if name == _OWN else _flat(name, rows[1:], width)
        good = [entry for entry in entries if _is_entry(entry)]
        if len(good) != len(entries):
            place = next(at for at, entry in enumerate(entries) if not _is_entry(entry))
            raise ScoresMisalignedError(
                f"{name} at position {place // width} of the response is {entries[place]!r:.80}, not"
                " [log-probability, token id]"
            )
        shape = (length, width)
        return cls(
            name,
            np.array([entry[1] for entry in good], np.int32).reshape(shape),
            np.array([entry[0] for entry in good], np.float32).reshape(shape),
        )

    def check_ids(self, wanted: IdArray) -> None:
        wrong = np.argwhere(self.ids != wanted)
        if len(wrong):
            row, column = wrong[0]
            raise ScoresMisalignedError(
                f"{self.name} scores token {self.ids[row, column]} at position {row} of the response,"
                f" which has {wanted[row, column]} there"
            )


def _chosen(metas: Sequence[Mapping[str, object]], wanted: IdArray, how: ChosenIds) -> TokenTable:
    length, width = wanted.shape
    found = np.full(wanted.shape, np.nan, np.float32)
    for meta in metas:
        if how is ChosenIds.UNION:
            width = _row_width(meta.get(_CHOSEN))
        column = _Column.read(meta, _CHOSEN, length, width)
        if column is None:
            raise ScoresMisalignedError(
                f"the answer has no {_CHOSEN}; the server does not know how tokens are chosen by"
                f" position: use {ChosenIds.UNION.value!r}"
            )
        if how is not ChosenIds.UNION:
            column.check_ids(wanted)
            return TokenTable.of_arrays(wanted, column.scores)
        _pick(column, wanted, found)
    if np.isnan(found).any():
        row, at = np.argwhere(np.isnan(found))[0]
        raise ScoresMisalignedError(
            f"{_CHOSEN} lacks token {wanted[row, at]} at position {row} of the response"
        )
    return TokenTable.of_arrays(wanted, found)


def _pick(many: _Column, wanted: IdArray, found: ScoreArray) -> None:
    """Put the scores of `wanted` that `many` has into `found`."""
    for row, ids in enumerate(many.ids):
        order = np.argsort(ids, kind="stable")
        places = np.searchsorted(ids[order], wanted[row]).clip(max=len(ids) - 1)
        there = order[places]
        is_there = ids[there] == wanted[row]
        found[row, is_there] = many.scores[row, there[is_there]]


def _row_width(rows: object) -> int:
    if isinstance(rows, list) and len(rows) > 1 and isinstance(rows[1], list):
        return len(rows[1])
    return 0


def _meta(answer: Mapping[str, object]) -> Mapping[str, object]:
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise ScoresMisalignedError("the answer has no meta_info; it is none of /generate")
    return meta


def _version(meta: Mapping[str, object]) -> str | None:
    version = meta.get("weight_version")
    return None if version is None else str(version)


def _decoded(meta: Mapping[str, object], name: str, kind: str) -> NDArray[np.generic]:
    text = meta.get(name)
    try:
        raw = base64.b64decode(text if isinstance(text, str) else "", validate=True)
        return np.frombuffer(raw, np.dtype(kind))
    except (binascii.Error, ValueError) as error:
        raise ScoresMisalignedError(f"{name} cannot be read: {error}") from None


def _flat(name: str, rows: list[object], width: int) -> list[object]:
    """The entries of all rows, which are equally long."""
    entries: list[object] = []
    for at, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            raise ScoresMisalignedError(
                f"{name} has {_size(row)} tokens at position {at}, and {width} were asked for"
            )
        entries += row
    return entries


def _is_entry(entry: object) -> TypeGuard[list[float | int]]:
    return (
        isinstance(entry, list)
        and len(entry) >= 2
        and type(entry[0]) in (float, int)
        and type(entry[1]) is int
        and 0 <= entry[1] < 1 << 31
    )


def _size(rows: object) -> str:
    return str(len(rows)) if isinstance(rows, list) else type(rows).__name__


def _count(name: str, found: str, length: int, width: int) -> ScoresMisalignedError:
    return ScoresMisalignedError(
        f"{name} has {found} entries; a response of {length} tokens needs {length + 1}"
        f" of {width}, the first of which is dropped"
    )
