"""What a model author implements: an `Entry` answers whole requests one at a time, a
`BatchingEntry` serves many at once through its own step loop.

A plugin is found by name: registered with `@Engine.register`, or through the `phalanx.models`
entry-point group of an installed package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, runtime_checkable

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.schema.control import ControlOp, Question, WeightAnswer
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.limits import Limits
from phalanx.schema.observation import Actions, Observation, PolicyInfo
from phalanx.schema.parallel import MODEL_DOMAINS, ParallelConfig, ResolvedParallelConfig
from phalanx.schema.statistics import LoopStatistics
from phalanx.schema.videos import VideoFile, VideoFormat, VideoPrompt

__all__ = [
    "PARALLEL_DOMAINS",
    "BatchingEntry",
    "Delta",
    "Entry",
    "EntryArgs",
    "Event",
    "Failed",
    "Final",
    "Limits",
    "LoopStatistics",
    "MergeableDelta",
    "PluginRef",
    "PolicyAdapter",
    "Scheduled",
    "Service",
    "ServiceEntry",
    "ServingAdapter",
    "VideoAdapter",
    "WeightStore",
]

PARALLEL_DOMAINS = frozenset({"pipeline", "cfg", "dense", "attention", "moe"})


@runtime_checkable
class MergeableDelta(Protocol):
    """A delta payload that can be joined with a later one that its reader has not taken yet."""

    def merged(self, later: Self) -> Self | None:
        """Both as one, or None where they cannot be joined."""
        ...


class ServingAdapter(Protocol):
    """What the text protocols of a model server need from a plugin, in the server's process.

    Loaded without the model: `tokenizer` is a `phalanx.processing.text.TextTokenizer`.
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def model_info(self) -> dict[str, Any]:
        """Facts for `/model_info`: model_path, model_type, architectures, ..."""
        ...


class PolicyAdapter(Protocol):
    """What the robot protocols of a model server need from a policy, in the server's process.

    Loaded without the model. It keeps nothing of a request: both methods may run for many requests
    at once, on any thread.
    """

    @property
    def info(self) -> PolicyInfo: ...

    def request(self, observation: Observation) -> Any:
        """The plugin's own request: resized, normalized, tokenized.

        Raises `InvalidRequestError` naming what of the observation the policy cannot use, and what
        it wants instead.
        """
        ...

    def actions(self, output: Any, observation: Observation) -> Actions:
        """The robot's own actions of the plugin's output: unnormalized, cut to what was wanted."""
        ...


class VideoAdapter(Protocol):
    """What the video route of a model server and `phalanx generate` need from a plugin that makes
    videos, in the caller's process.

    Loaded without the model. It keeps nothing of a request: its methods may run for many requests
    at once, on any thread. The plugin's deltas are `DenoiseProgress`.
    """

    @property
    def model_info(self) -> dict[str, Any]:
        """Facts for `/model_info`: model_path, model_type, ..."""
        ...

    @property
    def num_clip_frames(self) -> int:
        """How many frames of a clip are read, from its beginning."""
        ...

    def request(self, prompt: VideoPrompt) -> Any:
        """The plugin's own request: tokenized, resized.

        Raises `InvalidRequestError` naming the field of `prompt` that it cannot use.
        """
        ...

    def check_format(self, prompt: VideoPrompt, format: VideoFormat | None) -> None:
        """Refuse a form that the prompt's video cannot have, before it is computed.

        Raises `InvalidRequestError` naming the field, and `MissingDependencyError`.
        """
        ...

    def file(self, output: Any, prompt: VideoPrompt, format: VideoFormat | None) -> VideoFile:
        """The plugin's output as a file; `format` None: a picture of one frame, else a clip."""
        ...


class WeightStore(Protocol):
    """What a plugin whose weights can be replaced says of them; asked from any thread."""

    def check_weight(self, name: str, tensor: Any) -> None:
        """Refuse a tensor that no weight of the model takes.

        Raises `InvalidRequestError` naming the weight and what shape and dtype it takes.
        """
        ...


class _Plugin(ABC):
    """What both kinds declare; all of it is usable without an instance and without a device."""

    name: ClassVar[str]
    args_cls: ClassVar[type[EntryArgs]]
    request_cls: ClassVar[type[Any]]
    output_cls: ClassVar[type[Any]]
    rollout_cls: ClassVar[type[Any] | None] = None
    """What `Engine.rollout_step` takes, for a policy that is trained; `start` or `step` gets it."""
    parallel_domains: ClassVar[frozenset[str]] = frozenset()

    @staticmethod  # noqa: B027 - optional
    def validate(request: Any, limits: Limits) -> None:
        """Refuse a request that can never be served; runs in the caller before it is queued.

        Raises `InvalidRequestError` naming the field.
        """

    @classmethod
    def validate_parallel(
        cls, parallel: ParallelConfig, replica_world_size: int | None = None
    ) -> None:
        """Refuse a topology that this plugin cannot run; called before any process is started.

        A dimension that is split belongs to a domain in `parallel_domains`. A domain of the model
        scope that is not among them may only follow one that is: the same tensor parallelism, and
        nothing else. So nothing is computed twice unnoticed. `replica_world_size` None means what
        `parallel` implies. Overrides call this first, then raise `ConfigurationError` for more.
        """
        if replica_world_size is None:
            replica_world_size = parallel.infer_replica_world_size()
        resolved = parallel.resolve(replica_world_size)
        reasons = _reasons_against(resolved, cls.parallel_domains)
        if reasons:
            declared = ", ".join(sorted(cls.parallel_domains)) or "none: it runs on a single rank"
            raise ConfigurationError(
                f"plugin {cls.name!r} cannot run this topology (world size {resolved.world_size}): "
                f"{'; '.join(reasons)}. Domains that it declares: {declared}"
            )

    @classmethod  # noqa: B027 - optional
    def validate_args(cls, args: Any, parallel: ParallelConfig) -> None:
        """Refuse arguments that cannot be run in a topology that `validate_parallel` has accepted;
        called before any process is started.

        No weights are read. The checkpoint need not be on this machine. Raises `ConfigurationError`
        or `CheckpointError`.
        """

    @classmethod
    def serving(cls, args: Any) -> ServingAdapter | None:
        """The adapter for text protocols, or None for a plugin that is served by `/infer` only."""
        return None

    @classmethod
    def policy(cls, args: Any, settings: Mapping[str, Any]) -> PolicyAdapter | None:
        """The adapter for robot protocols, or None for a plugin that is no robot policy.

        `settings` are `adapter.args` of a server's file; a key that is unknown is refused by
        `ConfigurationError`. The checkpoint is on disk.
        """
        return None

    @classmethod
    def videos(cls, args: Any, settings: Mapping[str, Any]) -> VideoAdapter | None:
        """The adapter for videos, or None for a plugin that makes none; `settings` as of `policy`."""
        return None

    @abstractmethod
    def setup(self, args: Any) -> None:
        """Load the model; called once, before any request."""

    @property
    def weights(self) -> WeightStore | None:
        """What can be replaced by `ReplaceWeights`; None for a plugin that takes no new weights."""
        return None

    @property
    def limits(self) -> Limits:
        """Bounds on requests; read once, when `setup` has returned."""
        return Limits()

    def close(self) -> None:  # noqa: B027 - optional
        """Release everything; called once, after the last request has ended."""


class Entry(_Plugin):
    """Answers one whole request at a time."""

    @abstractmethod
    def step(self, request: Any) -> Any:
        """The answer to `request`. What this raises reaches the request's caller unchanged."""


class BatchingEntry(_Plugin):
    """Serves many requests at once. One thread calls all methods below; none may block."""

    @abstractmethod
    def start(self, rid: str, request: Any) -> None:
        """Take a request that `validate` has accepted. `rid` is unique among live requests."""

    @abstractmethod
    def cancel(self, rid: str) -> None:
        """End a request soon, with a `Final(cancelled=True)`; unknown ids are ignored."""

    @abstractmethod
    def tick(self) -> Sequence[Event]:
        """Run one step of the loop and return what happened, in order."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether `tick` would do or report anything now."""

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` has `busy` asked again. Called once, after `setup`, for a plugin that something
        outside makes busy; it may call `wake` from any thread.
        """

    def control(self, op: ControlOp) -> bool:
        """Apply `op` between two ticks; False where it was refused.

        Every rank of a replica gets it at the same point. `InvalidRequestError`,
        `WeightUpdateError` and `RequestFailedError` reach the caller, on all ranks alike, and
        leave everything as it was; any other exception breaks the replica.
        """
        raise NotImplementedError(f"plugin {self.name!r} has no control operations")

    def ask(self, question: Question) -> WeightAnswer:
        """Answer between two ticks, on every rank, of which the output rank's answer counts.

        Errors as those of `control`.
        """
        raise NotImplementedError(f"plugin {self.name!r} answers no questions about weights")

    def statistics(self) -> LoopStatistics:
        """Counters; called from the loop's thread."""
        return LoopStatistics()


class Service(Protocol):
    """A loaded model and its loop, such as a `LoopService`: methods as those of `BatchingEntry`."""

    @property
    def limits(self) -> Limits: ...

    @property
    def busy(self) -> bool: ...

    def cancel(self, rid: str) -> None: ...

    def tick(self) -> Sequence[Event]: ...

    def control(self, op: ControlOp) -> bool: ...

    def statistics(self) -> LoopStatistics: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Service)


class ServiceEntry(BatchingEntry, Generic[S]):
    """Hands its calls to the service that it has loaded; only `start` is its own."""

    _service: S

    @abstractmethod
    def load(self, args: Any) -> S:
        """Load the model and build everything that serves it."""

    def setup(self, args: Any) -> None:
        self._service = self.load(args)

    @property
    def limits(self) -> Limits:
        return self._service.limits

    def cancel(self, rid: str) -> None:
        self._service.cancel(rid)

    def tick(self) -> Sequence[Event]:
        return self._service.tick()

    @property
    def busy(self) -> bool:
        return self._service.busy

    def control(self, op: ControlOp) -> bool:
        return self._service.control(op)

    def statistics(self) -> LoopStatistics:
        return self._service.statistics()

    def close(self) -> None:
        self._service.close()


@dataclass(frozen=True)
class PluginRef:
    """A plugin by name and by where to import its class from (`module:Class`)."""

    name: str
    target: str


def _reasons_against(resolved: ResolvedParallelConfig, declared: frozenset[str]) -> list[str]:
    """Why a plugin that declares these domains cannot run this topology."""
    outer = (("pipeline", resolved.outer.pipeline_size), ("cfg", resolved.outer.cfg_size))
    reasons = [
        f"outer.{name}_size={size} splits the undeclared domain {name!r}"
        for name, size in outer
        if size > 1 and name not in declared
    ]
    leading = {name: resolved.tp_size(name) for name in MODEL_DOMAINS if name in declared}
    if resolved.scope_size > 1 and not leading:
        reasons.append(
            f"a model scope of {resolved.scope_size} ranks splits dense, attention and moe, of "
            "which none is declared"
        )
        return reasons
    following = [name for name in MODEL_DOMAINS if name not in declared]
    found = (_reason_against_following(resolved, name, leading) for name in following)
    return reasons + [reason for reason in found if reason is not None]


def _reason_against_following(
    resolved: ResolvedParallelConfig, name: str, leading: Mapping[str, int]
) -> str | None:
    """Why an undeclared domain does not just follow a declared one, whose tp_size `leading` has."""
    domain = resolved.domain(name)
    if not domain.is_tp_only:
        unsplit = asdict(type(domain)(domain.tp_size))
        others = {key: value for key, value in asdict(domain).items() if value != unsplit[key]}
        shown = ", ".join(f"{name}.{key}={value}" for key, value in others.items())
        return f"{shown} splits the undeclared domain {name!r}"
    size = resolved.tp_size(name)
    if not leading or size in leading.values():
        # Tensor-parallel groups of equal size are blocks of the same ranks.
        return None
    declared = ", ".join(f"{other}.tp_size={tp}" for other, tp in leading.items())
    return f"{name}.tp_size={size} of the undeclared domain {name!r} does not follow {declared}"
