"""What is sent to a control process, and how it describes its job."""

from __future__ import annotations

import enum

import msgspec

from phalanx.roles.contracts import Tag
from phalanx.roles.progress import UnpublishedReplica
from phalanx.wire.discovery import InternalDocument
from phalanx.wire.phases import PhasesDocument


class Activate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None: all of the memory, and serve."""

    tags: tuple[Tag, ...] | None = None


class EngineName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine_id: str


class Unblock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`holds`: the operator's own word for an engine that cannot say."""

    engine_id: str
    holds: tuple[Tag, ...] | None = None


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the job, as discovery shows it."""

    phase: str | None


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replicas: int


class UpdateWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's directory, which every engine reads."""

    path: str
    version: str


class ConfirmWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that a trainer has put into every replica."""

    version: str


class Broadcast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without path and version, the model is registered and the newest version told."""

    path: str | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if (self.path is None) != (self.version is None):
            raise ValueError("path and version belong together; give both or neither")


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`now`: running requests are cut off."""

    now: bool = False


class JobStage(enum.StrEnum):
    """`starting` until every role has started once."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class RoleStatus(msgspec.Struct, frozen=True):
    """A role's internal document, the tags that each replica holds (None: nobody is certain), and
    the replicas that are not published yet.
    """

    document: InternalDocument
    residency: dict[str, tuple[Tag, ...] | None] = {}
    unpublished: tuple[UnpublishedReplica, ...] = ()


class HeldMemory(msgspec.Struct, frozen=True):
    """What a process holds of a device under a tag. `owner`: ROLE/MODEL/N, or the trainer."""

    owner: str
    tag: str
    num_bytes: int
    pid: int


class DeviceStatus(msgspec.Struct, frozen=True):
    """A device of the plan. Of a simulated one: its size, the most that was ever held of it at once,
    and what is now; else why that is `unknown`. `place`: which device of which machine of a cluster.
    """

    node: str
    device: int
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    held: tuple[HeldMemory, ...] = ()
    place: str | None = None
    unknown: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway_url` is where callers go: `gateway_url/ROLE`, and `control_url` where operators do.
    `last_event` is the newest's number. `phases`: where the job is in its batch. `devices` are
    simulated ones, or those of a cluster. `trainer_environment`: the variables that tell the trainer's program its devices.
    """

    name: str
    epoch: str
    stage: JobStage
    pid: int
    started_wall_s: float
    control_url: str
    gateway_url: str
    gateway_up: bool
    log_directory: str
    last_event: int
    roles: tuple[RoleStatus, ...]
    phases: PhasesDocument | None = None
    devices: tuple[DeviceStatus, ...] = ()
    trainer_environment: dict[str, str] = {}
