"""Finds where a text ends: at the first stop string or stop expression in it.

The result does not depend on how the text is cut into pieces where stop strings are concerned.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.processing.text.stop_regex import StopPattern

WINDOW_CHARACTERS = 2048
"""How far back from the end of the text an expression's match may begin."""


class StopMatcher:
    """Watches one text; `feed` its pieces, then `finish` unless something matched.

    A stop string is cut off together with what follows it (`no_stop_trim` keeps the string). The
    text that an expression matched is kept. Of several matches the one that ends first counts,
    and of those that end together the longest.
    """

    def __init__(
        self,
        stop: StopStrings | Sequence[str],
        patterns: Sequence[StopPattern] = (),
        *,
        no_stop_trim: bool = False,
    ) -> None:
        """`patterns` are of `compile_stop_regex`; several matchers may share them, and `stop`."""
        tree = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._strings = _StringScanner(tree.root)
        self._patterns = patterns
        self._keep = no_stop_trim
        self._held = ""
        self._window = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """The text that is safe to hand out, and the stop string or expression that matched.

        After a match nothing further may be fed.
        """
        if not piece:
            return "", None
        text = self._held + piece
        found = self._strings.scan(piece)
        expression = self._search(piece)
        if expression is not None and (found is None or expression[1] < found.end):
            pattern, end = expression
            return text[: len(self._held) + end], pattern
        if found is not None:
            end = len(self._held) + found.end
            return text[: end if self._keep else end - len(found.string)], found.string
        safe = len(text) - self._strings.num_held
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """What was held back because it could have become a stop string."""
        held, self._held = self._held, ""
        return held

    def _search(self, piece: str) -> tuple[str, int] | None:
        """The expression whose first match ends first, with that end as an offset in `piece`."""
        if not self._patterns:
            return None
        # One character before the window shows whether it begins a line or a word.
        cut = len(self._window) - WINDOW_CHARACTERS
        lead = 1 if cut > 0 else 0
        before = self._window[cut - 1 :] if cut > 0 else self._window
        text = before + piece
        best: tuple[str, int] | None = None
        for pattern in self._patterns:
            match = pattern.search(text, lead)
            if match is not None:
                end = max(match.end() - len(before), 0)
                if best is None or end < best[1]:
                    best = (pattern.pattern, end)
        self._window = text
        return best


class _Found:
    __slots__ = ("end", "string")

    def __init__(self, string: str, end: int) -> None:
        self.string = string
        self.end = end


class StopStrings:
    """Stop strings as a tree of their characters; never changed once built."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.root = _Node(0)
        for string in strings:
            node = self.root
            for character in string:
                following = node.children.get(character)
                if following is None:
                    following = node.children[character] = _Node(node.depth + 1)
                node = following
            node.string = string


class _StringScanner:
    """Looks for all stop strings at once.

    `_open` holds the tree's nodes that the text's suffixes have reached, oldest first: one for
    each place where a stop string may have begun.
    """

    def __init__(self, root: _Node) -> None:
        self._root = root
        self._open: list[_Node] = []

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that could still become a stop string."""
        return self._open[0].depth if self._open else 0

    def scan(self, piece: str) -> _Found | None:
        """The first stop string that ends within `piece`."""
        root = self._root
        if not root.children:
            return None
        for at, character in enumerate(piece, start=1):
            reached: list[_Node] = []
            for node in self._open:
                following = node.children.get(character)
                if following is not None:
                    reached.append(following)
            begun = root.children.get(character)
            if begun is not None:
                reached.append(begun)
            self._open = reached
            for node in reached:
                if node.string is not None:
                    return _Found(node.string, at)
        return None


class _Node:
    __slots__ = ("children", "depth", "string")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.string: str | None = None
