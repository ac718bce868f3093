"""The small models on the engine give what their weights give without it: no cache, no slots, no
batches, no steps but the ones that the computation itself has.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Final
from phalanx.testing.models import (
    RECURRENT_PLACE,
    FlowRequest,
    encoder_decoder_parts,
    guided_flow_parts,
    recurrent_parts,
)
from phalanx.testing.models.encoder_decoder import DECODER, ENCODER
from phalanx.testing.models.flow_request import FLOW_NODE, LATENT_WIDTH, NUM_LATENTS
from phalanx.testing.models.parts import HEADS, WIDTH, rotary_tables
from tests.testing.models import Scored, ScoredTranslation

KV = HEADS.num_kv_heads


def run(parts, request):
    engine = parts.engine()
    loop = StepLoop(engine, Budget(256, 8))
    loop.start("r0", request)
    while loop.busy:
        for event in loop.tick():
            if isinstance(event, Final):
                payload = event.payload
    return payload


def attention(q, k, v, *, causal: bool):
    """Of `q` [T, H, D] to `k` and `v` [S, KV, D], the last T of the S being its own."""
    k, v = (part.repeat_interleave(HEADS.num_heads // KV, 1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / HEADS.head_dim**0.5
    if causal:
        seen = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)


class Stream:
    """Keys and values of one sequence by layer; stands in for attention over a cache."""

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            (torch.zeros(0, KV, HEADS.head_dim), torch.zeros(0, KV, HEADS.head_dim))
        ] * 2
        self.keeps, self.layer = True, 0

    def attend(self, qkv, heads, rotary):
        cos, sin = (table[:, None] for table in rotary)

        def rotated(x):
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        split = qkv.view(len(qkv), HEADS.num_heads + 2 * KV, HEADS.head_dim)
        q, k, v = split.split([HEADS.num_heads, KV, KV], dim=1)
        keys, values = self.layers[self.layer]
        keys, values = torch.cat((keys, rotated(k))), torch.cat((values, v))
        if self.keeps:
            self.layers[self.layer] = keys, values
        self.layer = (self.layer + 1) % 2
        return attention(rotated(q), keys, values, causal=self.keeps)


def through(blocks, x, positions, stream):
    rotary = rotary_tables(positions)
    for block in blocks:
        x = block.think(block.attend(x, stream, rotary))
    return x


FLOWS = [
    ((1, 2, 3), (4, 5), None, 3),
    ((1, 2, 3, 4, 5), (9, 8), (6,), 3),
    ((), (4, 4), (), 2),
    ((7, 7), (9,), (1, 2, 3), 4),
    ((7, 7), (), (), 2),
]


@pytest.mark.parametrize(("prefix", "prompt", "negative", "num_steps"), FLOWS)
def test_a_flow_is_what_its_weights_say(prefix, prompt, negative, num_steps):
    parts = guided_flow_parts(60, 6)
    node = parts.submodules[FLOW_NODE]
    request = FlowRequest(prefix, prompt, num_steps, negative=negative, scale=1.7, seed=5)
    found = torch.tensor(run(parts, request))

    main = Stream()

    def read(stream, tokens, first):
        if tokens:
            places = torch.arange(first, first + len(tokens))
            through(node._blocks, node._embedding[list(tokens)], places, stream)

    read(main, prefix, 0)
    away = copy.deepcopy(main)
    read(main, prompt, len(prefix))
    read(away, negative or (), len(prefix))
    x = request.resource_configs()["latents"].initial["x"]
    main.keeps = away.keeps = False
    for step in range(num_steps):
        entered = x @ node._enter.T + node._places + step / num_steps * node._clock
        towards, instead = (
            through(node._blocks, entered, torch.full((NUM_LATENTS,), place), stream)
            @ node._leave.T
            for stream, place in (
                (main, len(prefix) + len(prompt)),
                (away, len(prefix) + len(negative or ())),
            )
        )
        velocity = towards if negative is None else instead + 1.7 * (towards - instead)
        x = x + velocity / num_steps
    assert x.shape == (NUM_LATENTS, LATENT_WIDTH)
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", [(3, 1, 4, 1, 5), (7,), ()])
def test_a_translation_is_what_its_weights_say(source):
    parts = encoder_decoder_parts(40)
    encoder, decoder = parts.submodules[ENCODER], parts.submodules[DECODER]
    tokens, logits = run(parts, ScoredTranslation(source, 4))

    x = encoder._embedding[list(source)]
    x = x + torch.sin(x.cumsum(-1))
    q, k, v = (x @ encoder._qkv.T).view(len(x), 3, HEADS.num_heads, HEADS.head_dim).unbind(1)
    mixed = functional.scaled_dot_product_attention(*(one.transpose(0, 1) for one in (q, k, v)))
    x = x + mixed.transpose(0, 1).flatten(1) @ encoder._out.T
    contexts = [
        (x @ weight.T).view(len(x), 2, KV, HEADS.head_dim).unbind(1) for weight in encoder._contexts
    ]
    stream, given = Stream(), [0, *tokens[:-1]]
    for place, token in enumerate(given):
        rotary = rotary_tables(torch.tensor([place]))
        y = decoder._embedding[[token]]
        layers = zip(decoder._blocks, decoder._ask, decoder._hear, contexts, strict=True)
        for block, ask, hear, (keys, values) in layers:
            y = block.attend(y, stream, rotary)
            queries = (block.norm(y) @ ask.T).view(1, HEADS.num_heads, HEADS.head_dim)
            heard = torch.zeros(1, WIDTH)
            if source:
                heard = attention(queries, keys, values, causal=False)
            y = block.think(y + heard @ hear.T)
        expected = (y @ decoder._head.T)[0]
        torch.testing.assert_close(torch.tensor(logits[place]), expected, rtol=1e-4, atol=1e-4)
        assert tokens[place] == int(expected.argmax())


class Blank:
    """State of one row that nobody has written yet."""

    def __init__(self, **blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def read(self, name):
        return self.blocks[name]

    def write(self, name, values):
        self.blocks[name] = values


def test_a_recurrence_is_what_its_weights_say():
    parts = recurrent_parts(4)
    node = parts.submodules[RECURRENT_PLACE[0]]
    prompt = (3, 1, 4, 1, 5)
    tokens, logits = run(parts, Scored(prompt, 4, place=RECURRENT_PLACE))
    given = torch.tensor([*prompt, *tokens[:-1]])
    x = node._embedding[given][None]
    for layer in node._layers:
        blank = Blank(convolution=torch.zeros(1, 2, x.shape[-1]), recurrent=torch.zeros(1, 16))
        x = layer.run(x, torch.ones(1, len(given), dtype=torch.bool), blank)
    expected = (x[0] @ node._head.T)[len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-4)
    assert list(tokens) == expected.argmax(-1).tolist()
