"""Decodes JSON bodies into typed structs and says what is wrong in the field's own terms."""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar, get_args

import msgspec

from phalanx.errors import MalformedRequestError

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<path>.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`")
_NOT_FINITE = re.compile(rb"[:\[,]\s*-?(NaN|Infinity)\b")
_TYPES = re.compile(r"`([^`]*)`")
_LORA = "no LoRA adapters are served: merge it into the weights, and serve or send those"
_INSTEAD = {
    "lora_path": _LORA,
    "lora_id": _LORA,
    "image_data": "only text and token ids are read",
    "video_data": "only text and token ids are read",
    "audio_data": "only text and token ids are read",
    "input_embeds": "send text or input_ids",
    "session_params": "send the whole prompt: what was cached of its beginning is used again",
}
"""Why, or what serves the same end, by the fields that somebody may rely on."""


class BodyDecoder(Generic[T]):
    """Decodes one kind of body; `nested` are further structs whose fields may be misspelt in it."""

    def __init__(self, kind: type[T], nested: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        structs: list[type[msgspec.Struct]] = [kind, *nested]
        self._names = sorted(
            {field.name for struct in structs for field in msgspec.structs.fields(struct)}
        )
        self._words = {
            field.name: ", ".join(member)
            for struct in structs
            for field in msgspec.structs.fields(struct)
            for member in (field.type, *get_args(field.type))
            if isinstance(member, type) and issubclass(member, enum.StrEnum)
        }

    def decode(self, body: bytes) -> T:
        """The body. Raises `MalformedRequestError` with the field's path where there is one."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explained(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = " (NaN and Infinity are not JSON)" if _NOT_FINITE.search(body) else ""
            raise MalformedRequestError(f"the body is not valid JSON: {error}{hint}") from error
        except RecursionError as error:
            raise MalformedRequestError("the body is nested too deeply") from error

    def _explained(self, message: str) -> MalformedRequestError:
        placed = _PATH.match(message)
        what, path = (placed["what"], placed["path"]) if placed else (message, "")
        unknown = _UNKNOWN.match(what)
        if unknown:
            name = unknown["name"]
            return MalformedRequestError(
                f"unknown field {name!r}{f' in {path}' if path else ''}{self._nearest(name)}",
                field=f"{path}.{name}" if path else name,
            )
        what = _TYPES.sub(lambda found: found[1].replace(" | ", " or "), what)
        if what.startswith("Invalid enum value") and path in self._words:
            what += f"; allowed: {self._words[path]}"
        return MalformedRequestError(f"{path}: {what}" if path else what, field=path)

    def _nearest(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._names, n=1)
        return f"; did you mean {near[0]!r}?" if near else "; it is not part of this protocol"


def refuse_unsupported(
    values: Mapping[str, object], neutral: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuse known fields that nothing here serves, unless they ask for nothing.

    null, false and empty values ask for nothing, and so do those of `neutral` by field.
    """
    for name, value in values.items():
        if value is None or value is False or value == [] or value == {} or value == "":
            continue
        if value in neutral.get(name, ()):
            continue
        instead = f" ({_INSTEAD[name]})" if name in _INSTEAD else ""
        raise MalformedRequestError(
            f"{name} is not supported by this server{instead}; leave it out or send null",
            field=name,
        )
