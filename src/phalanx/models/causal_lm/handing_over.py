"""Requests that begin on one engine and go on on another: what is kept, imported and let go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm.sequence import Kept, Sequence
from phalanx.schema.generate import GenerateRequest, Handoff, SequenceHandoff
from phalanx.step.declaration import DEFAULT_LABEL
from phalanx.step.resources.kv_cache import KVCache
from phalanx.step.resources.positions import Positions
from phalanx.step.transfer.base import TAKEN, Ending, Reason


@dataclass(frozen=True)
class HandingOver:
    """See the module. Of a replica of one rank: several would see transfers end at other times."""

    cache: KVCache
    positions: Positions
    num_ranks: int

    def check(self, request: GenerateRequest, num_prompt_tokens: int) -> None:
        """Refuse what cannot be handed over, and a handoff of another request."""
        handoff = request.handoff
        if not request.hands_over and handoff is None:
            return
        field = "handoff" if handoff is not None else "hands_over"
        if self.num_ranks > 1:
            raise InvalidRequestError(
                f"a replica of {self.num_ranks} ranks hands nothing over and takes nothing over; "
                "use replicas of one rank for prefill and decode",
                field=field,
            )
        if handoff is None:
            return
        if handoff.num_prompt_tokens != num_prompt_tokens:
            raise InvalidRequestError(
                f"the handoff is of a prompt of {handoff.num_prompt_tokens} tokens and this one "
                f"has {num_prompt_tokens}; give the same request to both engines",
                field=field,
            )
        for index, one in enumerate(handoff.sequences):
            lacking = _lacking(one, num_prompt_tokens)
            if lacking is not None:
                raise InvalidRequestError(
                    f"completion {index} of the handoff {lacking}; give it as the other engine "
                    "returned it",
                    field=field,
                )

    def keep(self, rid: str) -> Kept:
        """Hold a sequence's state for another engine."""
        positions = self.positions.publish(rid)
        return Kept(self.cache.hold(rid), positions)

    def drop(self, handoff: Handoff | None, message: str) -> None:
        """Tell the other engine that nothing of this is wanted any more."""
        for one in () if handoff is None else handoff.sequences:
            self._let_go(one, Ending(Reason.DROPPED, message))

    def ended(self, sequence: Sequence, message: str) -> None:
        """A sequence that began elsewhere has ended; what was held for it may not have been read."""
        handoff = sequence.request.handoff
        assert handoff is not None
        done = handoff.sequences[sequence.index]
        if not sequence.has_run:
            self._let_go(done, Ending(Reason.DROPPED, message))
        elif sequence.num_push_backs:
            # It may have been computed again from its start.
            self._let_go(done, TAKEN)

    def _let_go(self, done: SequenceHandoff, ending: Ending) -> None:
        if done.kv is not None:
            self.cache.let_go(done.kv, ending)


def _lacking(one: SequenceHandoff, num_prompt_tokens: int) -> str | None:
    """What a completion that is to go on with stored state lacks, or None."""
    if one.kv is None:
        return None
    if not one.output_ids:
        return "has stored state and no output_ids"
    stream = one.kv.ranks.get(0, {}).get(DEFAULT_LABEL)
    for name, found in (
        ("kv", 0 if stream is None else stream.length),
        ("positions", one.positions.get(DEFAULT_LABEL, 0)),
    ):
        if found != num_prompt_tokens:
            return f"has {found} tokens in {name} and the prompt has {num_prompt_tokens}"
    return None


def published(one: SequenceHandoff) -> Mapping[str, object]:
    """What the resources import before the first step."""
    return {} if one.kv is None else {"kv": one.kv, "positions": one.positions}
