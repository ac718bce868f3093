"""Bodies of SGLang's routes for weights, as SGLang 0.5.23 has them, and their answers.

Fields that steer what this server does anyway are accepted without effect: caches of old weights
are always dropped, and tensors are always put in whole.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.control import JoinWeightGroup, LeaveWeightGroup, ReceiveWeights, WeightCheck
from phalanx.wire.body import BodyDecoder

GROUP = "weight_update_group"
DISK_FORMATS = (None, "auto", "safetensors")
MOST_NUMBERS = 1 << 20
"""Of a weight in one answer."""

Version = str | int | None


class DiskBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weights_from_disk`."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: Version = None

    @property
    def version(self) -> str | None:
        return _version(self.weight_version)


class TensorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weights_from_tensor`: one base64 text for all ranks, or one for each."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: Version = None

    @property
    def version(self) -> str | None:
        return _version(self.weight_version)


class DistributedBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weights_from_distributed`; `name`, `dtype` and `shape` are those of a single one."""

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    name: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None
    group_name: str = GROUP
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: Version = None

    def op(self) -> ReceiveWeights:
        """What the engine is asked; the three lists belong together."""
        if self.load_format not in (None, "", "auto"):
            # A bucket is one broadcast of all: taken one by one, the group would hang.
            raise InvalidRequestError(
                f"load_format={self.load_format!r} is not received here; broadcast each weight by "
                "itself, in the order of names, and leave load_format out",
                field="load_format",
            )
        names, dtypes, shapes = self.names, self.dtypes, self.shapes
        if self.name is not None:
            if names or self.dtype is None or self.shape is None:
                raise MalformedRequestError(
                    "give names, dtypes and shapes, or name, dtype and shape", field="names"
                )
            names, dtypes, shapes = [self.name], [self.dtype], [self.shape]
        if not names:
            raise InvalidRequestError("names is empty; give the weights to come", field="names")
        if not len(names) == len(dtypes) == len(shapes):
            raise InvalidRequestError(
                f"names has {len(names)}, dtypes {len(dtypes)} and shapes {len(shapes)} entries; "
                "give one of each for every weight",
                field="names",
            )
        return ReceiveWeights(
            names=tuple(names),
            dtypes=tuple(one.removeprefix("torch.") for one in dtypes),
            shapes=tuple(map(tuple, shapes)),
            group_name=self.group_name,
            version=_version(self.weight_version),
        )


class JoinBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/init_weights_update_group`."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: str = "nccl"

    def op(self) -> JoinWeightGroup:
        port = self.master_port
        if isinstance(port, str):
            if not (port.isascii() and port.isdigit()):
                raise InvalidRequestError(
                    f"master_port={port!r} must be a number", field="master_port"
                )
            port = int(port)
        return JoinWeightGroup(
            master_address=self.master_address,
            master_port=port,
            rank_offset=self.rank_offset,
            world_size=self.world_size,
            group_name=self.group_name,
            backend=self.backend,
        )


class LeaveBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/destroy_weights_update_group`."""

    group_name: str = GROUP

    def op(self) -> LeaveWeightGroup:
        return LeaveWeightGroup(self.group_name)


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weight_version`; running requests end first unless that is not wanted."""

    new_version: str | int
    abort_all_requests: bool = True

    @property
    def version(self) -> str:
        return str(self.new_version)


class NamedWeightBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/get_weights_by_name`."""

    name: str
    truncate_size: int = 100

    @property
    def rows(self) -> int:
        if not 1 <= self.truncate_size <= MOST_NUMBERS:
            raise InvalidRequestError(
                f"truncate_size={self.truncate_size} must be from 1 to {MOST_NUMBERS}",
                field="truncate_size",
            )
        return self.truncate_size


class CheckBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/weights_checker`."""

    action: WeightCheck = WeightCheck.CHECKSUM


class EndBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/end_weight_update`."""

    weight_version: Version = None

    @property
    def version(self) -> str | None:
        return _version(self.weight_version)


_DISK = BodyDecoder(DiskBody)
_TENSOR = BodyDecoder(TensorBody)
_DISTRIBUTED = BodyDecoder(DistributedBody)
_JOIN = BodyDecoder(JoinBody)
_LEAVE = BodyDecoder(LeaveBody)
_VERSION = BodyDecoder(VersionBody)
_NAMED = BodyDecoder(NamedWeightBody)
_CHECK = BodyDecoder(CheckBody)
_END = BodyDecoder(EndBody)


def parse_disk(body: bytes) -> DiskBody:
    """The body; refused where its format is not one that is read."""
    parsed = _DISK.decode(body)
    if parsed.load_format not in DISK_FORMATS:
        raise InvalidRequestError(
            f"load_format={parsed.load_format!r} is not read here; give a Hugging Face directory "
            "with safetensors and leave load_format out",
            field="load_format",
        )
    return parsed


def parse_tensor(body: bytes) -> TensorBody:
    return _TENSOR.decode(body)


def parse_distributed(body: bytes) -> DistributedBody:
    return _DISTRIBUTED.decode(body)


def parse_join(body: bytes) -> JoinBody:
    return _JOIN.decode(body)


def parse_leave(body: bytes) -> LeaveBody:
    """The body, which may be empty."""
    return _LEAVE.decode(body or b"{}")


def parse_version(body: bytes) -> VersionBody:
    return _VERSION.decode(body)


def parse_named_weight(body: bytes) -> NamedWeightBody:
    return _NAMED.decode(body)


def parse_check(body: bytes) -> CheckBody:
    """The body, which may be empty."""
    return _CHECK.decode(body or b"{}")


def parse_end(body: bytes) -> EndBody:
    """The body, which may be empty."""
    return _END.decode(body or b"{}")


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str
    num_paused_requests: int | UnsetType = UNSET
    new_version: str | UnsetType = UNSET
    payload: Any = UNSET
    error_message: str | UnsetType = UNSET


def result_body(
    message: str,
    *,
    success: bool = True,
    num_paused_requests: int | UnsetType = UNSET,
    new_version: str | UnsetType = UNSET,
    payload: object = UNSET,
) -> bytes:
    """The answer of all routes for weights."""
    return msgspec.json.encode(
        _Result(
            success=success,
            message=message,
            num_paused_requests=num_paused_requests,
            new_version=new_version,
            payload=payload,
            error_message=UNSET if success else message,
        )
    )


def _version(given: Version) -> str | None:
    return None if given is None else str(given)
