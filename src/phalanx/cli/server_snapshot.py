"""What a running model server says about itself and its replicas, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.schema.statistics import EngineStatistics

PATH = "/server_info"


class _Info(msgspec.Struct):
    """The part of the answer that is shown; only Phalanx has the plugin beside the counters."""

    plugin: str
    served_model_name: str
    version: str
    internal_states: tuple[EngineStatistics, ...]


@dataclass(frozen=True)
class Snapshot:
    """A server's counters at one moment."""

    model: str
    plugin: str
    version: str
    statistics: EngineStatistics


@dataclass(frozen=True)
class Absent:
    """There are no counters now, but there may be later. `answered`: something did answer."""

    reason: str
    answered: bool


def base_url(text: str) -> str:
    """The address of a server, for which `host:port` is enough."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(
            f"{text!r} is not the address of a server; give one such as http://127.0.0.1:30000"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def take_snapshot(url: str, api_key: str | None, timeout_s: float) -> Snapshot | Absent:
    """Ask the server at `url`.

    Raises `ConfigurationError` where asking again would not help: something else answers there, or
    the server wants another key.
    """
    headers = {"Accept": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(url + PATH, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return _refused(url, error, api_key)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Absent(f"{url} does not answer: {_words(reason, timeout_s)}", answered=False)
    try:
        info = msgspec.json.decode(body, type=_Info)
        (statistics,) = info.internal_states
    except (msgspec.DecodeError, ValueError):
        raise _not_phalanx(url, "its answer is of another form") from None
    return Snapshot(info.served_model_name, info.plugin, info.version, statistics)


def _refused(url: str, error: urllib.error.HTTPError, api_key: str | None) -> Absent:
    if error.code == 401:
        given = "the key that was given is not its key" if api_key else "it asks for a key"
        raise ConfigurationError(f"{url} refuses: {given}; give the right one with --api-key")
    if error.code in (502, 503, 504):
        return Absent(f"{url} answers {error.code}: {_message(error)}", answered=True)
    raise _not_phalanx(url, f"GET {PATH} answers {error.code} {error.reason}")


def _message(error: urllib.error.HTTPError) -> str:
    """The text of a refusal in JSON, as servers word it; else the status's own."""
    try:
        body = json.load(error)["error"]
        return str(body["message"] if isinstance(body, dict) else body)
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason


def _not_phalanx(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{url} is not a Phalanx model server: {why}; give the address that `phalanx serve` prints"
    )


def _words(reason: object, timeout_s: float) -> str:
    if isinstance(reason, TimeoutError):
        return f"nothing came within {timeout_s:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__
