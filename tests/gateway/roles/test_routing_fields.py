"""Routing fields leave a body, and nothing else of it changes."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import MalformedRequestError
from phalanx.gateway.roles import json_members
from phalanx.gateway.roles.routing_fields import (
    RoutingFields,
    for_chat,
    for_generate,
    read_fields,
    served_name,
)

DECODER = msgspec.json.Decoder(RoutingFields)
NAMED = ("model", "route_key")


def generate(body: bytes) -> bytes:
    return for_generate(body, read_fields(DECODER, body))


def chat(body: bytes, *, after: bytes = b"{}") -> bytes:
    served = served_name("served")
    for_chat(after, read_fields(DECODER, after), served)
    return for_chat(body, read_fields(DECODER, body), served)


def pairs(body: bytes) -> list[tuple[str, object]]:
    """The members in their order, duplicates too."""
    found: list[tuple[str, object]] = json.loads(body, object_pairs_hook=lambda given: given)
    return found


def escaped(name: str, places: set[int]) -> str:
    return "".join(
        f"\\u{ord(letter):04x}" if place in places else letter for place, letter in enumerate(name)
    )


SPACE = st.sampled_from(["", "", "", " ", "\n\t", "  "])
KEYS = st.sampled_from(
    ["model", "route_key", "text", "a", 'say \\"model', "mod\\u00e9l", "models", ""]
) | st.builds(
    escaped, st.sampled_from(["model", "route_key", "text"]), st.sets(st.integers(0, 8), max_size=3)
)
STRINGS = st.sampled_from(
    ['"model"', '"route_key"', '"x"', '"the \\"model\\": 1"', '"\\\\"', '"\\u006dodel"', '"é,}"']
)
VALUES = st.recursive(
    STRINGS | st.sampled_from(["null", "1.50", "-0", "true", "[]", "{}", "1e5"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + " , ".join(items) + "]"),
        st.lists(st.tuples(KEYS, inner), max_size=3).map(
            lambda items: "{" + ",".join(f'"{key}" :{value}' for key, value in items) + " }"
        ),
    ),
    max_leaves=6,
)


@st.composite
def bodies(draw) -> bytes:
    made = []
    for _ in range(draw(st.integers(0, 6))):
        key = draw(KEYS)
        routes = json.loads(f'"{key}"') in NAMED
        value = draw(STRINGS | st.just("null") if routes else VALUES)
        before, after, inner, end = (draw(SPACE) for _ in range(4))
        made.append(f'{before}"{key}"{after}:{inner}{value}{end}')
    space = draw(SPACE)
    return (space + "{" + (",".join(made) or space) + "}" + space).encode()


@given(body=bodies())
@settings(deadline=None, max_examples=100)
@example(b'{"a":"model","mod\\u0065l":"x"}')
@example(b'{"model":"a","model":null,"route_key":"k"}')
@example(b'{"text":"x" , "route_key" : "k","model":"a"}')
def test_i30_routing_fields_go_and_every_other_member_stays_as_it_was(body):
    read = json.loads(body)
    fields = read_fields(DECODER, body)
    for name in NAMED:
        told = getattr(fields, name)
        assert told == read[name] if name in read else told is msgspec.UNSET
    kept = [pair for pair in pairs(body) if pair[0] not in NAMED]
    assert pairs(generate(body)) == kept
    told = pairs(chat(body))
    assert [pair for pair in told if pair[0] != "model"] == kept
    assert [pair for pair in told if pair[0] == "model"] == [("model", "served")]
    # The members that stay are there byte for byte, so that taking nothing out changes nothing.
    if len(kept) == len(pairs(body)):
        assert generate(body) == body


@given(first=bodies(), body=bodies())
@settings(deadline=None, max_examples=100)
@example(b'{"model":"a","b":1}', b'{"model":"a","model":"c"}')
@example(b'{"model":"a","b":1}', b'{"model":"a","mod\\u0065l":"c"}')
@example(b'{"model":null}', b'{"model":null,"a":{"model":1}}')
@example(b'{"a":{"b":"x"},"model":"a"}', b'{"a":{"b":"x"},"model":"ab"}')
def test_what_was_remembered_of_one_body_changes_no_other(first, body):
    assert chat(body, after=first) == chat(body)


@pytest.mark.parametrize(
    ("body", "stripped", "renamed"),
    [
        (b'{"model":"a"}', b"{}", b'{"model":"served"}'),
        (b" { } ", b" { } ", b' {"model":"served" } '),
        (
            b'{"text": "x", "model" : "a" }',
            b'{"text": "x"}',
            b'{"text": "x", "model" : "served" }',
        ),
        (
            b'{"model": "a", "n": 1.50}',
            b'{ "n": 1.50}',
            b'{"model": "served", "n": 1.50}',
        ),
        (
            b'{"n":1,"model":null,"m":2,"route_key":"k"}',
            b'{"n":1,"m":2}',
            b'{"n":1,"model":"served","m":2}',
        ),
        (b'{"a":{"model":"b"}}', b'{"a":{"model":"b"}}', b'{"model":"served","a":{"model":"b"}}'),
        (
            b'{"role":"model","model":"a"}',
            b'{"role":"model"}',
            b'{"model":"served","role":"model"}',
        ),
    ],
)
def test_d2_bytes(body, stripped, renamed):
    assert generate(body) == stripped
    assert chat(body) == renamed


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", ""),
        (b"[1]", ""),
        (b'"model"', ""),
        (b"{", ""),
        (b"\xff{}", ""),
        (b'{"model": 1}', "model"),
        (b'{"route_key": ["k"]}', "route_key"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    ],
)
def test_i29_a_body_that_is_no_object_is_refused(body, field):
    with pytest.raises(MalformedRequestError) as refusal:
        read_fields(DECODER, body)
    assert refusal.value.field == field


def test_what_is_too_large_to_be_searched_is_refused():
    much = b"[" + b"[]," * (json_members.MAX_TOKENS // 2) + b"1]"
    assert generate(b'{"model":"a","x":' + much + b"}") == b'{"x":' + much + b"}"
    for body in (
        b'{"model":"a","model":"b","x":' + much + b',"y":1}',
        b'{"mod\\u0065l":"b","x":' + much + b"}",
    ):
        with pytest.raises(MalformedRequestError, match="too large to be searched"):
            generate(body)


def test_names_that_are_no_text_stay_as_they_are():
    """Engines that read only a part of a body do not look at the others."""
    body = b'{"a\\n\xff":1,"mod\\u0065l":"m"}'
    assert generate(body) == b'{"a\\n\xff":1}'
    assert chat(body) == b'{"model":"served","a\\n\xff":1}'
