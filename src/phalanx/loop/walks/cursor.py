"""Where a walk stands: which nodes are due, given which have ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.loop.walks.sections import Loop, Node, Parallel, Section, Sequential


@dataclass(frozen=True)
class LoopHooks:
    """What the walk does when a loop begins and after each iteration, which says if it goes on."""

    begin: Callable[[Loop], None]
    goes_on: Callable[[Loop], bool]


class Cursor:
    """Begins at the start of a section; `due` holds its nodes that are to run now, in order."""

    def __init__(self, section: Section, hooks: LoopHooks) -> None:
        self.due: dict[str, Node] = {}
        self._hooks = hooks
        self._at: dict[str, _NodeAt] = {}
        self._root = self._place(section, None)
        self._root.begin()

    def end(self, node: str) -> None:
        """A node that was due has run."""
        del self.due[node]
        self._at[node].end()

    @property
    def ended(self) -> bool:
        """Whether the whole section has run."""
        return not self.due

    def _place(self, section: Section, parent: _At | None) -> _At:
        match section:
            case Node():
                at = self._at[section.name] = _NodeAt(parent, section, self.due)
                return at
            case Sequential(parts):
                sequence = _SequenceAt(parent)
                sequence.parts = [self._place(part, sequence) for part in parts]
                return sequence
            case Parallel(branches):
                parallel = _ParallelAt(parent)
                parallel.branches = [self._place(branch, parallel) for branch in branches]
                return parallel
            case Loop(section=inner):
                loop = _LoopAt(parent, section, self._hooks)
                loop.section = self._place(inner, loop)
                return loop


class _At(ABC):
    """A section that runs: `begin` starts it, and it calls `end` when it has ended."""

    def __init__(self, parent: _At | None) -> None:
        self._parent = parent

    @abstractmethod
    def begin(self) -> None: ...

    def end(self) -> None:
        if self._parent is not None:
            self._parent.child_ended()

    def child_ended(self) -> None:
        self.end()


class _NodeAt(_At):
    def __init__(self, parent: _At | None, node: Node, due: dict[str, Node]) -> None:
        super().__init__(parent)
        self._node = node
        self._due = due

    def begin(self) -> None:
        self._due[self._node.name] = self._node


class _SequenceAt(_At):
    def __init__(self, parent: _At | None) -> None:
        super().__init__(parent)
        self.parts: list[_At] = []
        self._index = 0

    def begin(self) -> None:
        self._index = 0
        self.parts[0].begin()

    def child_ended(self) -> None:
        self._index += 1
        if self._index == len(self.parts):
            self.end()
        else:
            self.parts[self._index].begin()


class _ParallelAt(_At):
    def __init__(self, parent: _At | None) -> None:
        super().__init__(parent)
        self.branches: list[_At] = []
        self._num_running = 0

    def begin(self) -> None:
        self._num_running = len(self.branches)
        for branch in self.branches:
            branch.begin()

    def child_ended(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self.end()


class _LoopAt(_At):
    def __init__(self, parent: _At | None, loop: Loop, hooks: LoopHooks) -> None:
        super().__init__(parent)
        self.section: _At
        self._loop = loop
        self._hooks = hooks

    def begin(self) -> None:
        self._hooks.begin(self._loop)
        self.section.begin()

    def child_ended(self) -> None:
        if self._hooks.goes_on(self._loop):
            self.section.begin()
        else:
            self.end()
