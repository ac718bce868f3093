"""The small models with too little room for all requests at once: what is dropped is computed again,
what is moved to the host comes back, and requests give what they give alone.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Final
from phalanx.testing.models import (
    RECURRENT_PLACE,
    FlowRequest,
    TranslateRequest,
    encoder_decoder_parts,
    guided_flow_parts,
    recurrent_parts,
)
from phalanx.testing.token_request import TokenRequest

TRANSLATIONS = [
    partial(TranslateRequest, range(1 + index, 8 + index), 9 + index % 3) for index in range(4)
]
FLOWS = [
    partial(
        FlowRequest,
        range(index, index + 6),
        range(5),
        3,
        negative=(1, 2) if index % 2 else None,
        seed=index,
    )
    for index in range(4)
]
TOKENS = [
    partial(TokenRequest, tuple(range(index, index + 4)), 5 + index, place=RECURRENT_PLACE)
    for index in range(5)
]
# Pages: a translation holds up to 3 + 2 of them, a flow 3 + 1 and, guided, 3 + 1 more.
MODELS = {
    "encoder-decoder": (partial(encoder_decoder_parts, 40), TRANSLATIONS),
    "encoder-decoder, few pages": (partial(encoder_decoder_parts, 9), TRANSLATIONS),
    "encoder-decoder, few pages and a host": (partial(encoder_decoder_parts, 9, 12), TRANSLATIONS),
    "flow": (partial(guided_flow_parts, 60, 6), FLOWS),
    "flow, few pages": (partial(guided_flow_parts, 14, 6), FLOWS),
    "flow, few pages and a host": (partial(guided_flow_parts, 14, 6, 20, 6), FLOWS),
    "flow, few latents": (partial(guided_flow_parts, 60, 2), FLOWS),
    "recurrent": (partial(recurrent_parts, 8), TOKENS),
    "recurrent, few slots": (partial(recurrent_parts, 2), TOKENS),
}


def run(parts, requests, running=8):
    """Outputs in order, and the loop as it ended."""
    engine = parts().engine()
    loop = StepLoop(engine, Budget(256, running))
    for index, request in enumerate(requests):
        loop.start(f"r{index}", request())
    ended = {}
    while loop.busy:
        ended |= {event.rid: event for event in loop.tick() if isinstance(event, Final)}
    assert engine.at_rest()
    return [ended[f"r{index}"].payload for index in range(len(requests))], loop


@pytest.mark.parametrize("name", MODELS)
def test_a_request_gives_what_it_gives_alone(name):
    parts, requests = MODELS[name]
    alone = [run(parts, [request])[0][0] for request in requests]
    together, _ = run(parts, requests)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith(("pages", "host"))])
def test_pages_do_run_out(name):
    _, loop = run(*MODELS[name])
    assert loop.num_push_backs + loop.num_offloads > 0, name
    assert (loop.num_offloads > 0) is name.endswith("host")


@pytest.mark.parametrize("name", [name for name in MODELS if "slots" in name or "latents" in name])
def test_who_finds_no_slot_waits_for_one(name):
    """State does not grow, so nobody is admitted who could not go on."""
    _, loop = run(*MODELS[name])
    assert loop.num_push_backs == loop.num_offloads == 0
