"""What a handler of the gateway gets and gives: one whole request, one whole response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import msgspec

RawHeaders = tuple[tuple[bytes, bytes], ...]
JSON = "application/json"


class Headers:
    """The fields of a message in their order; a name may repeat, and its case does not matter."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: RawHeaders = ()) -> None:
        """`pairs` have lower-case names."""
        self._pairs = pairs

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Self:
        return cls(
            tuple(
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in fields.items()
            )
        )

    def get(self, name: str, default: str = "") -> str:
        """The first value of that name."""
        key = name.lower().encode("latin-1")
        for each, value in self._pairs:
            if each == key:
                return value.decode("latin-1")
        return default

    def all(self, name: str) -> tuple[str, ...]:
        key = name.lower().encode("latin-1")
        return tuple(value.decode("latin-1") for each, value in self._pairs if each == key)

    @property
    def raw(self) -> RawHeaders:
        return self._pairs

    def __contains__(self, name: str) -> bool:
        key = name.lower().encode("latin-1")
        return any(each == key for each, _ in self._pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for name, value in self._pairs:
            yield name.decode("latin-1"), value.decode("latin-1")


@dataclass(frozen=True)
class HttpRequest:
    """One request, its body read whole and within the limit.

    `path` has its percent signs decoded; `params` are the named parts of the route's pattern;
    `query` keeps the last value of a name; `peer` is the client's `HOST:PORT`; `disconnected` is
    set when the client goes away, and the handler's task is cancelled then.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Headers
    body: bytes
    disconnected: asyncio.Event
    request_id: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""

    @property
    def content_type(self) -> str:
        """The media type without its parameters, in lower case."""
        return self.headers.get("content-type").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class HttpResponse:
    """One response; the server adds `content-length`, `x-request-id` and `connection`."""

    status: int
    body: bytes = b""
    headers: Headers = field(default_factory=Headers)

    @classmethod
    def json(
        cls, status: int, value: object, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """`value` is anything that msgspec encodes."""
        return cls.of(status, msgspec.json.encode(value), JSON, headers)

    @classmethod
    def text(
        cls, status: int, text: str, content_type: str = "text/plain; charset=utf-8"
    ) -> HttpResponse:
        return cls.of(status, text.encode(), content_type)

    @classmethod
    def of(
        cls,
        status: int,
        body: bytes,
        content_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        return cls(status, body, Headers.of({"content-type": content_type, **(headers or {})}))


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
