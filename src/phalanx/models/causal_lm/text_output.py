"""The text of one sequence as its tokens arrive: decoded piece by piece, cut at a stop string."""

from __future__ import annotations

from phalanx.processing.text import IncrementalDetokenizer, StopMatcher


class TextOutput:
    """Feeds tokens through the detokenizer and the stop matcher; `take` hands out new text."""

    def __init__(self, detokenizer: IncrementalDetokenizer, matcher: StopMatcher | None) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._pieces: list[str] = []
        self._num_taken = 0
        self._finished = False

    @property
    def whole(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def feed(self, token: int, may_stop: bool) -> str | None:
        """Add one token; the stop string or expression that it completes, if any.

        While `may_stop` is False nothing is searched for.
        """
        piece = self._detokenizer.feed((token,))
        if self._matcher is None or not may_stop:
            self._pieces.append(piece)
            return None
        safe, matched = self._matcher.feed(piece)
        self._pieces.append(safe)
        if matched is not None:
            self._finished = True
        return matched

    def finish(self, last_token: int | None = None) -> None:
        """Nothing follows (but `last_token`): hand out what was held back."""
        if self._finished:
            return
        self._finished = True
        tail = "" if last_token is None else self._detokenizer.feed((last_token,))
        tail += self._detokenizer.finish()
        if self._matcher is not None:
            safe, matched = self._matcher.feed(tail)
            tail = safe if matched is not None else safe + self._matcher.finish()
        self._pieces.append(tail)

    def take(self) -> str:
        """Text since the last call."""
        fresh = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return fresh
