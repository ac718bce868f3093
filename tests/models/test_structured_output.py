"""Structured output: what a model writes is what its schema, expression or rules describe."""

from __future__ import annotations

import json
import re
import string
import threading

import msgspec
import pytest

from phalanx.errors import RequestFailedError
from phalanx.models.causal_lm.grammar import GrammarSource
from phalanx.models.causal_lm.grammar_queue import GrammarQueue, Prompt
from phalanx.models.causal_lm.token_grammar import GrammarCompiler, TokenGrammar
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.schema.generate import Abort, GenerateRequest, Length, LogprobOptions, Stop
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive
from tests.models.test_greedy import CAPITAL, chat_ids

EOS = 2
DATE = r"(19|20)\d{2}-[01]\d-[0-3]\d"


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    age: int
    tags: list[str]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    sides: int | None
    closed: bool


PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
SHAPE = json.dumps(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["circle", "square", "blob"]},
            "sides": {"anyOf": [{"type": "integer", "maximum": 99}, {"type": "null"}]},
            "closed": {"type": "boolean"},
        },
        "required": ["kind", "sides", "closed"],
        "additionalProperties": False,
    }
)
LIST = 'root ::= item (", " item){2}\nitem ::= [a-z]{2,8}'


def request(model, prompt="Describe a person as JSON.", **sampling) -> GenerateRequest:
    params = {"temperature": 0.0, "max_new_tokens": 80, **sampling}
    return GenerateRequest(
        input_ids=chat_ids(model, prompt),
        sampling=SamplingParams(**params),
        logprobs=LogprobOptions(),
    )


def texts(output) -> list[str]:
    return [completion.text for completion in output.completions]


def by_schema(kind):
    return lambda text: msgspec.json.decode(text, type=kind)


def by_regex(expression):
    def check(text):
        assert re.fullmatch(expression, text, re.ASCII)

    return check


CASES = [
    ({"json_schema": PERSON}, by_schema(Person)),
    ({"json_schema": PERSON, "temperature": 1.0, "n": 3}, by_schema(Person)),
    ({"json_schema": SHAPE, "temperature": 1.5, "n": 2}, by_schema(Shape)),
    ({"json_schema": '{"enum": [1, "two", null]}'}, by_schema(int | str | None)),
    ({"json_schema": '{"const": {"a": [true]}}'}, by_schema(dict[str, list[bool]])),
    ({"regex": DATE}, by_regex(DATE)),
    ({"regex": DATE, "temperature": 2.0, "n": 3}, by_regex(DATE)),
    ({"regex": r"\w{3}/\d+\.", "temperature": 2.0}, by_regex(r"\w{3}/\d+\.")),
    ({"ebnf": LIST}, by_regex(r"[a-z]{2,8}(, [a-z]{2,8}){2}")),
    ({"ebnf": 'root ::= "yes" | "no"', "temperature": 1.0}, by_regex("yes|no")),
]


def check_written(model, cases, **options):
    """All together, and beside requests without a grammar, which it leaves alone."""
    plain = request(model, "List three fruits.", max_new_tokens=12)
    requests = [request(model, sampling_seed=3, **sampling) for sampling, _ in cases]
    drive = Drive(model, **options)
    *outputs, beside = drive.run(*requests, plain)
    for (_, check), output in zip(cases, outputs, strict=True):
        for completion in output.completions:
            assert isinstance(completion.finish_reason, Stop), completion
            check(completion.text)
            assert len(completion.logprobs.values) == len(completion.token_ids)
    [alone] = Drive(model).run(plain)
    assert beside.completions[0].token_ids == alone.completions[0].token_ids
    assert (drive.service.statistics().num_retractions > 0) == bool(options)


def test_what_is_written_is_what_is_described(smollm2):
    check_written(smollm2, [CASES[0], CASES[2], CASES[6]])


def test_whoever_writes_writes_what_is_described(shallow):
    """Also where nothing that the model says makes sense; objects it fills with blanks."""
    check_written(shallow, [CASES[3], *CASES[5:]])


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"pool_tokens": 176}], ids=["roomy", "pushed back"])
def test_every_description_is_kept_to(smollm2, options):
    check_written(smollm2, CASES, **options)


def test_seeds_reproduce_whatever_else_runs(shallow):
    """Pushed back in the middle, each output goes on where its grammar stood."""
    seeded = request(shallow, regex=DATE, temperature=1.5, sampling_seed=8, n=2)
    [alone] = Drive(shallow).run(seeded)
    drive = Drive(shallow)
    drive.start("seeded", seeded)
    drive.start("other", request(shallow, json_schema=PERSON, max_new_tokens=12))
    while len(drive.deltas["seeded"]) < 8:
        drive.tick()
    drive.service.control(Pause(PauseMode.RETRACT))
    drive.service.control(Continue())
    drive.finish()
    assert drive.output("seeded").num_retractions == 2
    assert texts(drive.output("seeded")) == texts(alone)
    assert len(set(texts(alone))) == 2


def test_the_grammar_ends_the_output(shallow):
    """At its last token where nothing may follow, at the end of text where more could."""
    closed, open_ended = Drive(shallow).run(
        request(shallow, regex="(cat|dog)"),
        request(shallow, "Say yes.", regex="[Yy]es.{0,3}"),
    )
    [completion] = closed.completions
    assert completion.finish_reason == Stop()
    assert EOS not in completion.token_ids
    assert completion.text in ("cat", "dog")
    [completion] = open_ended.completions
    assert completion.finish_reason in (Stop(), Stop(EOS))


@pytest.mark.parametrize("schema", ["$$ANY$$", "true", '{"type": "object"}'])
def test_any_object(tiny, schema):
    """A model that speaks noise still writes JSON, or is cut off in the middle of it."""
    asked = GenerateRequest(
        prompt="a", sampling=SamplingParams(json_schema=schema, max_new_tokens=100, n=8)
    )
    [output] = Drive(tiny, pool_tokens=2048).run(asked)
    ends = [completion.finish_reason for completion in output.completions]
    for completion in output.completions:
        assert completion.text
        if isinstance(completion.finish_reason, Stop):
            value = json.loads(completion.text)
            assert schema == "true" or isinstance(value, dict)
    assert Stop(EOS) in ends or Stop() in ends


def test_other_ends_come_first(shallow):
    cut, stopped, by_token = Drive(shallow).run(
        request(shallow, json_schema=PERSON, max_new_tokens=4),
        request(shallow, regex="[ab]{9}stop[ab]{9}", stop=("op",), stop_token_ids=()),
        request(shallow, regex="[0-9]{30}", stop_token_ids=tuple(range(32, 42))),
    )
    assert cut.completions[0].finish_reason == Length(4)
    assert stopped.completions[0].finish_reason == Stop("op")
    assert re.fullmatch("[ab]{9}st", texts(stopped)[0])
    assert isinstance(by_token.completions[0].finish_reason, Stop)


def test_least_number_of_tokens(smollm2):
    """No end before it where the grammar goes on; the grammar's own end comes first."""
    longer, finite, nothing = Drive(smollm2).run(
        request(smollm2, CAPITAL, regex=r"[\w ,.]*", min_new_tokens=15, max_new_tokens=16),
        request(smollm2, regex="ok", min_new_tokens=15),
        request(smollm2, regex="", min_new_tokens=15, ignore_eos=True),
    )
    assert len(longer.completions[0].token_ids) >= 15
    assert texts(longer)[0].startswith("The capital of France is Paris.")
    assert texts(finite) == ["ok"]
    assert finite.completions[0].finish_reason == Stop()
    assert texts(nothing) == [""]
    assert nothing.completions[0].finish_reason == Stop()


def test_characters_of_many_tokens_stay_whole(shallow):
    """An emoji and two ideographs that the vocabulary spells in bytes."""
    written = "😀🦜 北京 ok"
    drive = Drive(shallow)
    [output] = drive.run(request(shallow, regex=written))
    assert texts(output) == [written]
    [deltas] = drive.deltas.values()
    assert len(deltas) > len(written)
    assert "\ufffd" not in "".join(delta.text for delta in deltas)
    assert [delta.text for delta in deltas if delta.text == ""]


def test_compiled_grammars_are_kept(shallow):
    drive = Drive(shallow)
    asked = request(shallow, regex="kept|held")
    drive.start("first", asked)
    assert drive.service.statistics().num_waiting == 1
    drive.start("same", asked)
    drive.finish()
    drive.start("again", asked)
    drive.tick()
    assert "again" in drive.scheduled
    drive.finish()
    assert len({texts(drive.output(rid))[0] for rid in drive.ended}) == 1


def test_the_loop_goes_on_while_a_grammar_compiles(shallow):
    """A request that came later, and needs none, is not held up."""
    drive = Drive(shallow)
    drive.start("structured", request(shallow, json_schema=PERSON))
    drive.start("plain", request(shallow, max_new_tokens=1))
    drive.tick()
    assert "plain" in drive.ended
    drive.finish()
    assert re.match(r'\{\s*"name"\s*:', texts(drive.output("structured"))[0])


def test_cancel_and_pause_while_a_grammar_compiles(shallow):
    drive = Drive(shallow)
    for rid in ("cancelled", "kept", "aborted"):
        drive.start(rid, request(shallow, regex=f"{rid}|other", n=2))
    assert not drive.service.control(Flush())
    drive.service.control(Pause(PauseMode.IN_PLACE))
    assert not drive.service.busy
    drive.service.cancel("cancelled")
    drive.tick()
    drive.service.control(Continue())
    while "kept" not in drive.ended:
        drive.tick()
    drive.start("late", request(shallow, regex="never compiled before"))
    drive.service.control(Pause(PauseMode.ABORT))
    drive.tick()
    drive.service.control(Continue())
    drive.finish()
    for rid in ("cancelled", "late"):
        event = drive.ended[rid]
        assert event.cancelled
        assert all(one.finish_reason == Abort() for one in event.payload.completions)
        assert all(one.token_ids == () for one in event.payload.completions)
    assert set(texts(drive.output("kept"))) <= {"kept", "other"}
    drive.service.close()


@pytest.fixture(scope="module")
def compiler(shallow):
    return GrammarCompiler(shallow.tokenizer, shallow.config.vocab_size, shallow.config.eos_ids)


def test_digits_and_words_are_ascii(shallow, compiler):
    grammar = compiler.compile(GrammarSource("regex", r"\d\w"))
    assert grammar.allowed.shape == (shallow.config.vocab_size,)
    first = {shallow.tokenizer.token_bytes(token)[:1] for token in grammar.allowed.nonzero()[0]}
    assert first == {b"%d" % digit for digit in range(10)}
    grammar.advance(shallow.tokenizer.token_id("7"))
    rest = {shallow.tokenizer.token_text(token) for token in grammar.allowed.nonzero()[0]}
    assert rest == set(string.ascii_letters + string.digits + "_")


def test_blanks_in_json_come_to_an_end(shallow, compiler):
    """A model that has fallen into writing blanks must write a value at last."""
    grammar = compiler.compile(GrammarSource("json_schema", '{"type": "array"}'))
    blank, line = shallow.tokenizer.encode(" ")[0], shallow.tokenizer.encode("\n")[0]
    grammar.advance(shallow.tokenizer.token_id("["))
    grammar.advance(line)
    assert not grammar.allowed[line]
    count = 0
    while grammar.allowed[blank]:
        grammar.advance(blank)
        count += 1
    assert count == 24
    grammar.advance(shallow.tokenizer.token_id("]"))
    assert grammar.ended


def test_a_token_that_is_not_allowed_ends_the_request(compiler):
    """It cannot be sampled; if it were, the failure is the request's own."""
    grammar = compiler.compile(GrammarSource("regex", "abc"))
    with pytest.raises(RequestFailedError, match="regex"):
        grammar.copy().advance(EOS)
    assert grammar.allowed.any()


def test_the_newest_grammars_are_kept(compiler):
    sources = [GrammarSource("regex", f"a{{{count}}}") for count in range(1, 67)]
    grammar = compiler.compile(sources[0])
    for source in sources[:64]:
        compiler.keep(source, grammar)
    assert compiler.find(sources[0]) is grammar
    for source in sources[64:]:
        compiler.keep(source, grammar)
    assert [compiler.find(source) for source in sources[:4]] == [grammar, None, None, grammar]


class HeldCompiler:
    """Compiles nothing until it is told to, and notes what it was asked for."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def compile(self, source: GrammarSource) -> TokenGrammar:
        self.asked.append(source.text)
        self.go.wait()
        raise source.refusal("it was only a test")


def test_a_grammar_that_nobody_waits_for_is_left():
    compiler = HeldCompiler()
    queue = GrammarQueue(compiler)
    asked = GenerateRequest(prompt="x")
    for rid, text in (("a", "one"), ("b", "two"), ("c", "two"), ("d", "three")):
        queue.add(Prompt(rid, asked, (5,)), GrammarSource("regex", text))
    assert list(queue.take(patient=False)) == []
    for rid in ("b", "d"):
        assert queue.remove(rid).rid == rid
    assert queue.remove("b") is None
    compiler.go.set()
    taken = []
    while len(queue):
        taken += [(prompt.rid, str(error)) for prompt, error in queue.take(patient=True)]
    queue.close()
    assert taken == [(rid, "regex cannot be used: it was only a test") for rid in ("a", "c")]
    assert compiler.asked == ["one", "two"]


def test_close_while_a_grammar_compiles(shallow):
    drive = Drive(shallow)
    drive.start("structured", request(shallow, json_schema=PERSON))
    drive.service.close()
    drive.tick()
    assert drive.ended["structured"].cancelled
