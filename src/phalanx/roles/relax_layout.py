"""Which devices Relax's arguments give to which engines: bundles of a group, one a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import ConfigurationError
from phalanx.roles.relax_flags import RelaxFlags
from phalanx.schema.job_placement import ACTOR_GROUP
from phalanx.schema.roles import (
    EngineGroupSpec,
    EngineKind,
    ModelPlacement,
    Ownership,
    PlacementMode,
    WorkerType,
)

_DEFAULT_NODE = 8


@dataclass(frozen=True)
class Share:
    """`num_replicas` engines of `ranks` GPUs each, from bundle `first` on."""

    role: str
    first: int
    num_replicas: int
    ranks: int
    gpus_per_node: int
    owner: Ownership
    deferred: bool

    def group(
        self, args: Mapping[str, object], worker_type: WorkerType = WorkerType.REGULAR
    ) -> EngineGroupSpec:
        """These engines, with SGLang's `args`."""
        bundles = range(self.first, self.first + self.num_replicas * self.ranks)
        placement = ModelPlacement(
            pg_owner=self.owner,
            bundle_indices=tuple(bundles),
            gpu_ids=(),
            activation_group=ACTOR_GROUP if self.deferred else None,
            activation_phase=self.role if self.deferred else None,
        )
        return EngineGroupSpec(
            num_replicas=self.num_replicas,
            engine=EngineKind.SGLANG,
            worker_type=worker_type,
            ranks_per_replica=self.ranks,
            nodes_per_replica=-(-self.ranks // self.gpus_per_node),
            engine_args=args,
            placement=placement,
        )

    def split(self, num_first: int) -> tuple[Share, Share]:
        """The first replicas, and the others."""
        head = self._part(self.first, num_first)
        rest = self._part(self.first + num_first * self.ranks, self.num_replicas - num_first)
        return head, rest

    def _part(self, first: int, num_replicas: int) -> Share:
        return Share(
            self.role,
            first,
            num_replicas,
            self.ranks,
            self.gpus_per_node,
            self.owner,
            self.deferred,
        )


class Layout:
    """Deals bundles to roles in the order in which they are asked for."""

    def __init__(self, flags: RelaxFlags) -> None:
        self._flags = flags
        self._resource = flags.mapping("resource")
        self.is_colocated = flags.is_on("colocate") and not flags.is_on("hybrid")
        self.gpus_per_node = flags.number("num_gpus_per_node", _DEFAULT_NODE) or _DEFAULT_NODE
        self._next: dict[str, int] = {}
        self.actor_gpus = self._actor_gpus()
        self.rollout_gpus = self._rollout_gpus()

    def resource(self, role: str, default: int) -> int:
        """How many GPUs `--resource` gives the role."""
        entry = self._resource.get(role)
        if entry is None:
            return default
        if not (
            isinstance(entry, (list, tuple))
            and len(entry) == 2
            and all(type(number) is int and number >= 0 for number in entry)
        ):
            raise ConfigurationError(
                f"--resource: {role}={entry!r} must be a pair of whole numbers, as [1, 8]"
            )
        gpus: int = entry[1]
        return gpus

    def needed_resource(self, role: str) -> int:
        gpus = self.resource(role, 0)
        if gpus < 1:
            raise ConfigurationError(f"--resource gives {role!r} no GPUs; add {role!r}: [1, N]")
        return gpus

    def share(self, role: str, gpus: int, ranks: int) -> Share:
        """The next `gpus` of the role, in engines of `ranks`."""
        if ranks < 1 or gpus < 1 or gpus % ranks:
            raise ConfigurationError(
                f"{role}: {gpus} GPUs cannot be divided into engines of {ranks}; change the number"
                " of GPUs, or of those of an engine"
            )
        if ranks > self.gpus_per_node and ranks % self.gpus_per_node:
            raise ConfigurationError(
                f"{role}: an engine of {ranks} GPUs is larger than a machine of"
                f" {self.gpus_per_node} and must fill whole ones"
            )
        used = self._next.get(role, 0)
        self._next[role] = used + gpus
        return Share(
            role,
            self._beginning(role) + used,
            gpus // ranks,
            ranks,
            self.gpus_per_node,
            Ownership.CONTROLLER if self.is_colocated else Ownership.MANAGER,
            self.mode(role) is PlacementMode.DEFER,
        )

    def mode(self, role: str) -> PlacementMode:
        """How the role shares devices. Rollout defers where a role that scores its answers does."""
        if not self.is_colocated:
            return PlacementMode.DECOUPLED
        deferring = {"genrm": self._judges_share, "teacher": self._teachers_share}
        deferred = any(deferring.values()) if role == "rollout" else deferring[role]
        return PlacementMode.DEFER if deferred else PlacementMode.SPLIT

    def check(self) -> None:
        """Whether what was dealt fits the trainer's devices. Raises `ConfigurationError`."""
        if not self.is_colocated:
            return
        ends = {role: self._beginning(role) + used for role, used in self._next.items()}
        for role, end in ends.items():
            if end > self.actor_gpus:
                raise ConfigurationError(
                    f"{role} ends at GPU {end} of the {self.actor_gpus} that the actor has; give"
                    " it or those before it fewer"
                )

    def check_rollout(self) -> None:
        """Whether the groups of rollout are exactly its GPUs."""
        used = self._next.get("rollout", 0)
        if used != self.rollout_gpus:
            raise ConfigurationError(
                f"--sglang-config: the engine_groups have {used} GPUs, and rollout has"
                f" {self.rollout_gpus}; fill up with a placeholder group"
            )

    @property
    def _judges_share(self) -> bool:
        """Whether judges have rollout's own GPUs, which is possible one after the other only."""
        gpus = self.resource("genrm", self._flags.number("genrm_num_gpus", 1) or 1)
        wanted = "genrm_model_path" in self._flags or "genrm_instances" in self._flags
        shares = wanted and self.rollout_gpus == self.actor_gpus and gpus > 0
        if shares and not self._flags.is_on("defer_reward_to_post_process"):
            raise ConfigurationError(
                "rollout and genrm have the same GPUs at the same time; give them separate ones"
                " (rollout + genrm = actor), or --defer-reward-to-post-process"
            )
        return shares

    @property
    def _teachers_share(self) -> bool:
        shares = self.rollout_gpus == self.actor_gpus and self.resource("teacher", 0) > 0
        if shares and not self._flags.is_on("opd_teacher_defer"):
            raise ConfigurationError(
                "rollout and teacher have the same GPUs at the same time; give them separate ones"
                " (rollout + teacher = actor), or --opd-teacher-defer"
            )
        return shares

    def _beginning(self, role: str) -> int:
        """Of the role's bundles, in the trainer's group or in one of its own."""
        if not self.is_colocated or role == "rollout" or self.mode(role) is PlacementMode.DEFER:
            return 0
        before = self.rollout_gpus
        if role == "teacher" and self.mode("genrm") is PlacementMode.SPLIT:
            before += self._next.get("genrm", 0)
        return before

    def _actor_gpus(self) -> int:
        nodes = self._flags.number("actor_num_nodes", 1) or 1
        per_node = self._flags.number("actor_num_gpus_per_node", _DEFAULT_NODE) or _DEFAULT_NODE
        return self.resource("actor", nodes * per_node)

    def _rollout_gpus(self) -> int:
        gpus = self.resource("rollout", self._flags.number("rollout_num_gpus") or 0)
        if gpus:
            return gpus
        if self._flags.is_on("rollout_external") or "rollout_external_engine_addrs" in self._flags:
            return 0
        if self.is_colocated:
            return self.actor_gpus
        raise ConfigurationError(
            "--rollout-num-gpus is missing; give it, or the rollout of --resource"
        )
