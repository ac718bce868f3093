"""How one replica of a model is cut over ranks: frozen sizes, and what they mean for a number of
ranks. Replicas are not described here; they belong to the deployment.

The outer dimensions split the ranks into model scopes. Dense layers, attention and experts each
split the whole of a scope, so the product of each domain's sizes is the scope's number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from phalanx.errors import ConfigurationError, WrongTypeError

Sizes = tuple[tuple[str, int], ...]
"""Names of dimensions with their sizes, the fastest-varying first."""


@dataclass(frozen=True)
class OuterParallelConfig:
    """Splits that apply to every layer: pipeline stages, and branches of guidance."""

    pipeline_size: int = 1
    cfg_size: int = 1

    def __post_init__(self) -> None:
        _size("outer.pipeline_size", self.pipeline_size)
        _size("outer.cfg_size", self.cfg_size)


@dataclass(frozen=True)
class DenseParallelConfig:
    """The split of dense layers. `tp_size` None takes what the scope leaves.

    With `sequence_parallel` the tokens between two layers are split over the tensor-parallel
    group; that takes no further ranks.
    """

    tp_size: int | None = None
    dp_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        _tensor_parallel_size("dense.tp_size", self.tp_size)
        _size("dense.dp_size", self.dp_size)
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigurationError(
                f"dense.sequence_parallel={self.sequence_parallel!r} must be True or False"
            )

    @property
    def other_sizes(self) -> Sizes:
        """The dimensions beside tensor parallelism."""
        return (("dp", self.dp_size),)

    @property
    def is_tp_only(self) -> bool:
        """Whether nothing but tensor parallelism is asked for."""
        return self.dp_size == 1 and not self.sequence_parallel


@dataclass(frozen=True)
class AttentionParallelConfig:
    """The split of attention. `tp_size` None takes what the scope leaves.

    `decode_cp_size` divides each tensor-parallel group for decoding; it takes no further ranks.
    """

    tp_size: int | None = None
    cp_size: int = 1
    dp_size: int = 1
    decode_cp_size: int = 1

    def __post_init__(self) -> None:
        _tensor_parallel_size("attention.tp_size", self.tp_size)
        _size("attention.cp_size", self.cp_size)
        _size("attention.dp_size", self.dp_size)
        _size("attention.decode_cp_size", self.decode_cp_size)

    @property
    def other_sizes(self) -> Sizes:
        """The dimensions beside tensor parallelism."""
        return (("cp", self.cp_size), ("dp", self.dp_size))

    @property
    def is_tp_only(self) -> bool:
        """Whether nothing but tensor parallelism is asked for."""
        return self.cp_size == self.dp_size == self.decode_cp_size == 1


@dataclass(frozen=True)
class MoeParallelConfig:
    """The split of experts. `tp_size` None takes what the scope leaves."""

    tp_size: int | None = None
    ep_size: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        _tensor_parallel_size("moe.tp_size", self.tp_size)
        _size("moe.ep_size", self.ep_size)
        _size("moe.dp_size", self.dp_size)

    @property
    def other_sizes(self) -> Sizes:
        """The dimensions beside tensor parallelism."""
        return (("ep", self.ep_size), ("dp", self.dp_size))

    @property
    def is_tp_only(self) -> bool:
        """Whether nothing but tensor parallelism is asked for."""
        return self.ep_size == self.dp_size == 1


ModelDomain = DenseParallelConfig | AttentionParallelConfig | MoeParallelConfig

MODEL_DOMAINS = ("dense", "attention", "moe")
"""Domains that each split the whole of a model scope."""


@dataclass(frozen=True)
class ParallelConfig:
    """The topology of one replica; by default a single rank, or tensor parallelism over all."""

    outer: OuterParallelConfig = field(default_factory=OuterParallelConfig)
    dense: DenseParallelConfig = field(default_factory=DenseParallelConfig)
    attention: AttentionParallelConfig = field(default_factory=AttentionParallelConfig)
    moe: MoeParallelConfig = field(default_factory=MoeParallelConfig)

    def __post_init__(self) -> None:
        _part("outer", self.outer, OuterParallelConfig)
        _part("dense", self.dense, DenseParallelConfig)
        _part("attention", self.attention, AttentionParallelConfig)
        _part("moe", self.moe, MoeParallelConfig)

    @property
    def outer_size(self) -> int:
        """Number of model scopes in a replica."""
        return self.outer.pipeline_size * self.outer.cfg_size

    def infer_replica_world_size(self) -> int:
        """The number of ranks of one replica: the smallest that these sizes describe.

        Raises `ConfigurationError` where the domains describe scopes of different sizes, or no
        number of ranks fits all of them.
        """
        given = {name: size for name, size in self._scope_sizes().items() if size is not None}
        if len(set(given.values())) > 1:
            shown = ", ".join(f"{self._product(name)} ranks" for name in given)
            raise ConfigurationError(
                f"the domains imply different model-scope sizes: {shown}; dense, attention and moe "
                "split the same ranks, so give them equal products or leave out a tp_size, which "
                "is then derived"
            )
        scope = next(iter(given.values()), None) or math.lcm(
            self.dense.dp_size,
            self.attention.cp_size * self.attention.dp_size * self.attention.decode_cp_size,
            self.moe.ep_size * self.moe.dp_size,
        )
        world = self.outer_size * scope
        self.resolve(world)
        return world

    def resolve(self, world: int) -> ResolvedParallelConfig:
        """This topology over `world` ranks of one replica, every omitted size filled in."""
        _size("the number of ranks of a replica", world)
        if world % self.outer_size:
            raise ConfigurationError(
                f"outer.pipeline_size={self.outer.pipeline_size} x outer.cfg_size="
                f"{self.outer.cfg_size} = {self.outer_size} does not divide the {world} ranks of "
                f"a replica; choose sizes whose product divides {world}"
            )
        scope = world // self.outer_size
        attention_tp = self._resolved_tp("attention", scope)
        if attention_tp % self.attention.decode_cp_size:
            raise ConfigurationError(
                f"attention.decode_cp_size={self.attention.decode_cp_size} does not divide the "
                f"attention tensor-parallel size {attention_tp}; decode groups subdivide a "
                f"tensor-parallel group, so choose a divisor of {attention_tp}"
            )
        return ResolvedParallelConfig(
            world_size=world,
            scope_size=scope,
            outer=self.outer,
            dense=replace(self.dense, tp_size=self._resolved_tp("dense", scope)),
            attention=replace(self.attention, tp_size=attention_tp),
            moe=replace(self.moe, tp_size=self._resolved_tp("moe", scope)),
        )

    def domain(self, name: str) -> ModelDomain:
        """The part named `dense`, `attention` or `moe`."""
        return _domain(name, self.dense, self.attention, self.moe)

    def _scope_sizes(self) -> dict[str, int | None]:
        """By domain, the ranks that its sizes cover; None where its tensor-parallel size is open."""
        return {
            name: None if domain.tp_size is None else domain.tp_size * _others(domain)
            for name, domain in ((name, self.domain(name)) for name in MODEL_DOMAINS)
        }

    def _resolved_tp(self, name: str, scope: int) -> int:
        domain = self.domain(name)
        others = _others(domain)
        if domain.tp_size is not None:
            if domain.tp_size * others != scope:
                raise ConfigurationError(
                    f"{self._product(name)} ranks, but a model scope has {scope}; make the "
                    f"product {scope}, or leave out {name}.tp_size, which is then derived"
                )
            return domain.tp_size
        if scope % others:
            raise ConfigurationError(
                f"{self._product(name)} does not divide the {scope} ranks of a model scope; "
                f"choose sizes whose product divides {scope}"
            )
        return scope // others

    def _product(self, name: str) -> str:
        """The sizes of a domain that were given and their product, for a message."""
        domain = self.domain(name)
        tensor = () if domain.tp_size is None else (("tp", domain.tp_size),)
        sizes = (*tensor, *domain.other_sizes)
        shown = " x ".join(f"{name}.{dim}_size={size}" for dim, size in sizes)
        return f"{shown} = {math.prod(size for _, size in sizes)}"


@dataclass(frozen=True)
class ResolvedParallelConfig:
    """A topology over a known number of ranks; the `tp_size` of every domain is a number.

    `scope_size` ranks form one model scope, and `world_size` ranks one replica.
    """

    world_size: int
    scope_size: int
    outer: OuterParallelConfig
    dense: DenseParallelConfig
    attention: AttentionParallelConfig
    moe: MoeParallelConfig

    def domain(self, name: str) -> ModelDomain:
        """The part named `dense`, `attention` or `moe`."""
        return _domain(name, self.dense, self.attention, self.moe)

    def tp_size(self, name: str) -> int:
        """The tensor-parallel size of a domain.

        Domains of equal size have the same tensor-parallel groups: those are blocks of
        neighbouring ranks.
        """
        size = self.domain(name).tp_size
        assert size is not None, "resolving fills it in"
        return size

    def sizes(self, name: str) -> Sizes:
        """All dimensions of a domain, tensor parallelism first; their product is `scope_size`."""
        return (("tp", self.tp_size(name)), *self.domain(name).other_sizes)


def _domain(
    name: str,
    dense: DenseParallelConfig,
    attention: AttentionParallelConfig,
    moe: MoeParallelConfig,
) -> ModelDomain:
    match name:
        case "dense":
            return dense
        case "attention":
            return attention
        case "moe":
            return moe
    raise ConfigurationError(
        f"{name!r} is not a domain of a model scope; allowed: {', '.join(MODEL_DOMAINS)}"
    )


def _others(domain: ModelDomain) -> int:
    return math.prod(size for _, size in domain.other_sizes)


def _size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r} must be a positive integer; 1 splits nothing")


def _tensor_parallel_size(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"{name}={value!r} must be a positive integer, or None to derive it from the others"
        )


def _part(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise WrongTypeError(
            f"ParallelConfig.{name} must be a {kind.__name__}, not {type(value).__name__} {value!r}"
        )
