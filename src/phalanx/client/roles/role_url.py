"""Where a role is: at a gateway under its name, or one engine that is named itself."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from phalanx.errors import ConfigurationError

_OPENAI_PATHS = ("/v1/chat/completions", "/chat/completions", "/v1")
_FORMS = "http://GATEWAY:PORT/ROLE, or http://ENGINE:PORT for one engine"


@dataclass(frozen=True)
class RoleUrl:
    """`base` is what paths are put after. `is_engine`: it has no discovery."""

    base: str
    is_engine: bool

    @classmethod
    def parse(cls, text: str) -> RoleUrl:
        """An URL that ends in `/generate` means what is in front of it.

        Raises `ConfigurationError` saying what is wrong with `text`.
        """
        parts = _split(text)
        path = parts.path.rstrip("/").removesuffix("/generate").rstrip("/")
        for known in _OPENAI_PATHS:
            if path.endswith(known):
                base = f"{parts.scheme}://{parts.netloc}{path.removesuffix(known)}"
                raise _refusal(
                    text,
                    f"is for OpenAI's clients, and a role's own adds {known} itself: it takes"
                    f" {base[:300]!r} here",
                )
        return cls(f"{parts.scheme}://{parts.netloc}{path}", is_engine=not path)

    @property
    def role(self) -> str:
        """The last part of its path, empty for an engine."""
        return "" if self.is_engine else self.base.rpartition("/")[2]


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        raise _refusal(text, f"cannot be read ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise _refusal(text, "is no HTTP URL")
    if not (parts.hostname and port_is_valid and text.isascii()):
        raise _refusal(text, "has no valid host and port")
    if "@" in parts.netloc:
        raise _refusal(text, "holds credentials; give api_key")
    if parts.query or parts.fragment:
        raise _refusal(text, "has a query or fragment")
    return parts


def _refusal(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"url {text[:300]!r} {why}; give {_FORMS}")
