"""Which ranks of a replica form which groups: a pure function of the resolved topology, torch-free.

Ranks count up through a scope first, then through the branches of guidance, then through the
pipeline: `rank = (pipeline * cfg_size + cfg) * scope_size + local`. Inside a scope the
tensor-parallel rank changes fastest: `local = tp + tp_size * (cp + cp_size * dp)` for attention,
and likewise for dense layers (tp, dp) and experts (tp, ep, dp).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.errors import ConfigurationError, UnknownGroupError
from phalanx.schema.parallel import MODEL_DOMAINS, ResolvedParallelConfig

Members = tuple[int, ...]
"""The ranks of one group, ascending."""

GROUP_NAMES = (
    "world",
    "pipeline",
    "cfg",
    "dense_tp",
    "dense_dp",
    "attention_tp",
    "attention_cp",
    "attention_dp",
    "attention_decode_cp",
    "moe_tp",
    "moe_ep",
    "moe_dp",
    "moe_tp_ep",
)
"""The families of groups; each divides all ranks of a replica."""


@dataclass(frozen=True)
class RankLayout:
    """The groups of `world` ranks, by family; immutable, and as good in another process.

    Raises `ConfigurationError` for a family of another name than `GROUP_NAMES` has, and for groups
    that are not ascending or do not hold each rank once.
    """

    world: int
    groups: Mapping[str, tuple[Members, ...]]

    def __post_init__(self) -> None:
        for name, family in self.groups.items():
            _check_family(name, family, self.world)
        frozen = {name: tuple(map(tuple, family)) for name, family in self.groups.items()}
        object.__setattr__(self, "groups", MappingProxyType(frozen))

    def groups_for(self, name: str) -> tuple[Members, ...]:
        """All groups of a family. Raises `UnknownGroupError`, a `KeyError`."""
        family = self.groups.get(name)
        if family is None:
            raise unknown_group(name, tuple(self.groups))
        return family

    def members_for(self, name: str, rank: int) -> Members:
        """The group of a family that `rank` belongs to.

        Raises `UnknownGroupError`, a `KeyError`, and `ConfigurationError` for a rank outside.
        """
        family = self.groups_for(name)
        for members in family:
            if rank in members:
                return members
        raise ConfigurationError(
            f"rank {rank!r} is not in this layout; its ranks are 0 to {self.world - 1}"
        )

    def group_rank(self, name: str, rank: int) -> int:
        """The position of `rank` in its group of a family."""
        return self.members_for(name, rank).index(rank)

    def __hash__(self) -> int:
        return hash((self.world, tuple(self.groups.items())))

    def __reduce__(self) -> tuple[type[RankLayout], tuple[int, dict[str, tuple[Members, ...]]]]:
        return RankLayout, (self.world, dict(self.groups))


def build_layout(resolved: ResolvedParallelConfig) -> RankLayout:
    """The groups of a replica of this topology."""
    places = [_place(resolved, rank) for rank in range(resolved.world_size)]
    outer = ("pipeline", "cfg")
    groups = {
        "world": (tuple(range(resolved.world_size)),),
        "pipeline": _family(places, lambda place: (place["cfg"], place["local"])),
        "cfg": _family(places, lambda place: (place["pipeline"], place["local"])),
        "moe_tp_ep": _family(places, _only(*outer, "moe_dp")),
        # Decode groups divide the tensor-parallel groups, so all but the place in the block is fixed.
        "attention_decode_cp": _family(
            places, _only(*outer, "attention_cp", "attention_dp", "attention_decode_block")
        ),
    }
    for domain in MODEL_DOMAINS:
        names = [f"{domain}_{dim}" for dim, _ in resolved.sizes(domain)]
        for name in names:
            groups[name] = _family(
                places, _only(*outer, *(other for other in names if other != name))
            )
    return RankLayout(resolved.world_size, {name: groups[name] for name in GROUP_NAMES})


def memberships(layout: RankLayout, rank: int) -> tuple[tuple[str, int], ...]:
    """Every family's name with the position of `rank` in its group of that family."""
    return tuple((name, layout.group_rank(name, rank)) for name in layout.groups)


def unknown_group(name: object, known: tuple[str, ...]) -> UnknownGroupError:
    """The error for a group that the topology does not have."""
    return UnknownGroupError(f"{name!r} is not a group; the groups are {', '.join(known)}")


def _place(resolved: ResolvedParallelConfig, rank: int) -> dict[str, int]:
    """The coordinates of a rank in every dimension."""
    scope, local = divmod(rank, resolved.scope_size)
    pipeline, cfg = divmod(scope, resolved.outer.cfg_size)
    place = {"pipeline": pipeline, "cfg": cfg, "local": local}
    for domain in MODEL_DOMAINS:
        rest = local
        for dim, size in resolved.sizes(domain):
            rest, place[f"{domain}_{dim}"] = divmod(rest, size)
    place["attention_decode_block"] = place["attention_tp"] // resolved.attention.decode_cp_size
    return place


def _only(*names: str) -> Callable[[dict[str, int]], Hashable]:
    return lambda place: tuple(place[name] for name in names)


def _family(
    places: list[dict[str, int]], key: Callable[[dict[str, int]], Hashable]
) -> tuple[Members, ...]:
    """The ranks that share `key`, group by group."""
    found: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(key(place), []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _check_family(name: str, family: tuple[Members, ...], world: int) -> None:
    if name not in GROUP_NAMES:
        raise ConfigurationError(
            f"{name!r} is not a family of groups; allowed: {', '.join(GROUP_NAMES)}"
        )
    if any(list(members) != sorted(set(members)) for members in family):
        raise ConfigurationError(
            f"the groups of {name} must each list ranks in ascending order without repetition: "
            f"{family!r}"
        )
    if sorted(rank for members in family for rank in members) != list(range(world)):
        raise ConfigurationError(
            f"the groups of {name} must hold each of the ranks 0 to {world - 1} exactly once: "
            f"{family!r}"
        )
