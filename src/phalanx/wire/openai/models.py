"""`GET /v1/models`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "phalanx"


class _List(msgspec.Struct, frozen=True, kw_only=True):
    data: list[_Model]
    object: str = "list"


def models_body(names: Sequence[str], *, created: int, root: str, max_len: int | None) -> bytes:
    """The list of served names, all of one checkpoint."""
    models = [_Model(id=name, created=created, root=root, max_model_len=max_len) for name in names]
    return msgspec.json.encode(_List(data=models))


def model_body(name: str, *, created: int, root: str, max_len: int | None) -> bytes:
    """One model, as `GET /v1/models/{name}` answers."""
    return msgspec.json.encode(_Model(id=name, created=created, root=root, max_model_len=max_len))
