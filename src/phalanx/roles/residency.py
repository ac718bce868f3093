"""What an engine holds of its memory, tag by tag, and of which tags nobody is certain."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.roles.contracts import ALL_TAGS, Tag


@dataclass(frozen=True)
class Residency:
    """`held` and `unknown` share no tag; the others are given back for certain."""

    held: frozenset[Tag] = ALL_TAGS
    unknown: frozenset[Tag] = frozenset()

    @property
    def is_certain(self) -> bool:
        return not self.unknown

    @property
    def is_complete(self) -> bool:
        return self.held == ALL_TAGS

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing, for certain."""
        return not self.held and not self.unknown

    def asked(self, tags: frozenset[Tag]) -> Residency:
        """While a call for these tags is under way, or when its answer was lost."""
        return Residency(self.held - tags, self.unknown | tags)

    def with_held(self, tags: frozenset[Tag]) -> Residency:
        return Residency(self.held | tags, self.unknown - tags)

    def without(self, tags: frozenset[Tag]) -> Residency:
        return Residency(self.held - tags, self.unknown - tags)

    def __str__(self) -> str:
        parts = [", ".join(sorted(self.held)) or "nothing"]
        if self.unknown:
            parts.append(f"perhaps {', '.join(sorted(self.unknown))}")
        return " and ".join(parts)
