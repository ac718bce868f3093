"""Who may ask a control process: whoever has its key, and no web page that a browser here shows.

A page can make a browser send a request to this machine. It cannot leave out `origin` where that
request changes anything, choose `host`, or send JSON to another site without being asked first.
"""

from __future__ import annotations

import hmac
import ipaddress

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

JSON = "application/json"


class ControlGuard:
    """Lets in what it does not refuse."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope["path"], dict(scope["headers"])) or self._app
        await answer(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        if _is_from_a_page(headers):
            return error_answer(
                403, "forbidden", "a browser's page may not ask the control process"
            )
        if not _is_address(headers.get(b"host", b"localhost").decode("latin-1")):
            return error_answer(
                403, "forbidden", "ask the control process by its address, as http://127.0.0.1:PORT"
            )
        given = headers.get(b"authorization", b"")
        if (
            self._wanted is not None
            and path != "/health"
            and not hmac.compare_digest(given, self._wanted)
        ):
            return error_answer(401, "unauthorized", "the control process asks for its key")
        kind = headers.get(b"content-type", JSON.encode()).decode("latin-1")
        if kind.partition(";")[0].strip().lower() != JSON:
            return error_answer(
                415, "not_json", f"content-type is {kind!r}; send JSON as {JSON}, or no body"
            )
        return None


def error_answer(status: int, code: str, message: str) -> Response:
    """A refusal in the form that all of them have."""
    body = {"error": {"code": code, "message": message}}
    return Response(msgspec.json.encode(body), status, media_type=JSON)


def _is_from_a_page(headers: dict[bytes, bytes]) -> bool:
    return b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none"


def _is_address(host: str) -> bool:
    """Whether it names no machine that a web page could have made a name for this one."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
