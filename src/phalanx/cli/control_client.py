"""A control process as the command line asks it: JSON over HTTP, one request after another."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from phalanx.cli.roles import JobAddress
from phalanx.cli.server_snapshot import base_url
from phalanx.client.control_refusals import refusal_in
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.roles.control_messages import Job
from phalanx.roles.events import RoleEvent
from phalanx.roles.run_file import NoJobError, RunDirectory
from phalanx.wire.discovery import InternalDocument, decode_internal
from phalanx.wire.phases import PhasesDocument

T = TypeVar("T")


class _Events(msgspec.Struct, frozen=True):
    last: int
    events: tuple[RoleEvent, ...]


class ControlClient:
    """Waits for as long as an operation takes.

    Every call raises `NoJobError` where nobody listens, and for a refusal the error that it means.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = base_url(url)
        self._key = key

    def job(self) -> Job:
        return self._get("/v1/job", Job)

    def events(self, after: int, wait_s: float) -> tuple[RoleEvent, ...]:
        """Those after the number `after`, waiting for the next one."""
        return self._get(
            f"/v1/events?{urlencode({'after': after, 'wait_s': wait_s})}", _Events
        ).events

    def ask(self, role: str, operation: str, body: Mapping[str, object]) -> InternalDocument:
        """Ask for an operation on a role, and wait for its end: what the role is then."""
        return decode_internal(self._send("POST", f"/v1/roles/{role}/{operation}", body))

    def phases(self, after: int | None = None, wait_s: float = 0.0) -> PhasesDocument:
        """Where the job is; with a number, once that is another one."""
        query = "" if after is None else f"?{urlencode({'after': after, 'wait_s': wait_s})}"
        return self._get(f"/v1/phases{query}", PhasesDocument)

    def move(self, operation: str, body: Mapping[str, object]) -> PhasesDocument:
        """Ask for an operation on the phases, and wait for its end: where the job is then."""
        answer = self._send("POST", f"/v1/phases/{operation}", body)
        return msgspec.json.decode(answer, type=PhasesDocument)

    def stop(self, *, now: bool) -> None:
        """Begin the end of the job."""
        self._send("POST", "/v1/shutdown", {"now": now})

    def _get(self, target: str, kind: type[T]) -> T:
        body = self._send("GET", target, None)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{self._url} is no control process of `phalanx up`: {error}"
            ) from None

    def _send(self, method: str, target: str, body: Mapping[str, object] | None) -> bytes:
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = make(parts.netloc)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        sent = None if body is None else msgspec.json.encode(body)
        if sent is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, parts.path + target, sent, headers)
            answer = connection.getresponse()
            received = answer.read()
        except (OSError, http.client.HTTPException) as error:
            words = (isinstance(error, OSError) and error.strerror) or str(error) or "it hung up"
            raise NoJobError(
                f"the control process at {self._url} does not answer: {words}"
            ) from None
        finally:
            connection.close()
        if answer.status >= 400:
            raise self._refused(answer.status, received)
        return received

    def _refused(self, status: int, body: bytes) -> PhalanxError:
        refusal = refusal_in(body)
        if refusal is None or not refusal.is_known:
            return ConfigurationError(
                f"{self._url} is no control process of `phalanx up`: it answers {status}; give the"
                " job's --name, or the control_url of `phalanx status --json`"
            )
        return refusal.error("give it with --key" if status == 401 else "")


def find_job(address: JobAddress) -> ControlClient:
    """The client of the job that is meant. Raises `NoJobError` where it does not run."""
    if address.control is not None:
        if address.name is not None:
            raise ConfigurationError("--name and --control are two ways to say which job; give one")
        return ControlClient(address.control, address.key)
    record = RunDirectory().find(address.name)
    return ControlClient(record.control_url, address.key or record.key)
