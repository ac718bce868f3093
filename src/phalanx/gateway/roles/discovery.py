"""`GET /<role>/engines`: the role's document, as it is or once it has changed, or in its old form."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.errors import UnknownModelError
from phalanx.gateway.http.message import JSON, HttpRequest, HttpResponse
from phalanx.gateway.http.queries import wait_s, whole
from phalanx.gateway.roles.old_engines import old_engines
from phalanx.gateway.roles.source import RoleSource
from phalanx.gateway.roles.way import role_refusal
from phalanx.routing.roles.encoded import EncodedDocuments

_SCHEMAS = ("1", "2")


class Discovery:
    """`lost` says why the role's manager is not heard, or is empty: then the last document stays,
    with that in it as `stale`.
    """

    def __init__(self, source: RoleSource, lost: Callable[[], str]) -> None:
        self._source = source
        self._lost = lost
        self._documents = EncodedDocuments()

    async def engines(self, request: HttpRequest) -> HttpResponse:
        """With `?after=REVISION&epoch=EPOCH&wait_s=S` once it is another than that, or after S."""
        query = request.query
        after, seconds = whole(request, "after"), wait_s(request)
        snapshot = self._source.snapshot
        if after is not None:
            snapshot = await self._source.wait(after, seconds, query.get("epoch"))
        schema = query.get("schema", "2")
        if schema == "1":
            name = query.get("model_name") or None
            if name is not None and name not in snapshot.content.by_name:
                known = ", ".join(map(repr, snapshot.content.by_name))
                error = UnknownModelError(
                    f"role {snapshot.role!r} has no model {name!r}; known: {known}",
                    field="model_name",
                )
                return role_refusal(error).response(request.path)
            return HttpResponse.json(200, old_engines(snapshot, name))
        if schema not in _SCHEMAS:
            message = f"schema={schema!r} is not known; known: {', '.join(_SCHEMAS)}"
            return HttpResponse.json(
                400, {"error": {"code": "invalid_request", "message": message}}
            )
        encoded = self._documents.of(snapshot, self._lost())
        compressed = encoded.compressed if _takes_gzip(request) else None
        if compressed is not None:
            return _document(compressed, {"content-encoding": "gzip", "vary": "accept-encoding"})
        return _document(encoded.discovery)


def _document(body: bytes, fields: dict[str, str] | None = None) -> HttpResponse:
    return HttpResponse.of(200, body, JSON, {"cache-control": "no-cache", **(fields or {})})


def _takes_gzip(request: HttpRequest) -> bool:
    codings = request.headers.get("accept-encoding").lower().split(",")
    return any(coding.strip() == "gzip" for coding in codings)
