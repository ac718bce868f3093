"""Grammars that are refused, and when: before the request is queued, or when it is compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.models.causal_lm.grammar import MAX_CHARACTERS
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive, load
from tests.models.test_structured_output import request, texts

LIMITS = Limits(context_length=512, vocab_size=49152)
NESTED = '{"items": ' * 2000 + "{}" + "}" * 2000
BAD = [
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[1]", "JSON object"),
    ("json_schema", '{"type": "flurb"}', "flurb"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than maximum"),
    ("json_schema", "false", "nothing matches"),
    ("json_schema", '{"not": {}}', "not"),
    ("json_schema", '{"type": "string", "pattern": "("}', ""),
    ("regex", "(", "unclosed group"),
    ("regex", "a(?=b)", "look-around"),
    ("regex", r"(a)\1", ""),
    ("regex", "a" * (MAX_CHARACTERS["regex"] + 1), "at most 65536 characters"),
    ("ebnf", "root ::= (", "GBNF"),
    ("ebnf", "root ::= missing", "missing"),
    ("ebnf", "", "root"),
    ("ebnf", "root ::= " + "(" * 1000 + '"a"' + ")" * 1000, "GBNF"),
]


@pytest.mark.parametrize(("field", "text", "named"), BAD)
def test_bad_grammars_are_refused_before_they_are_queued(field, text, named):
    asked = GenerateRequest(prompt="x", sampling=SamplingParams(**{field: text}))
    with pytest.raises(InvalidRequestError) as caught:
        CausalLM.validate(asked, LIMITS)
    assert caught.value.field == field
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("regex", r"a[^\s\S]b"),
        ("regex", r"[^\s\S]"),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", NESTED),
        ("regex", "(" + "a" * 5000),
        ("ebnf", "root ::= root"),
        ("ebnf", 'root ::= "' + "a" * 5000),
    ],
)
def test_what_nothing_matches_is_refused_at_the_start(shallow, field, text):
    asked = request(shallow, **{field: text})
    CausalLM.validate(asked, LIMITS)
    drive = Drive(shallow)
    drive.start("bad", asked)
    drive.start("good", request(shallow, regex="ok"))
    drive.finish()
    error = drive.error("bad")
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
    assert texts(drive.output("good")) == ["ok"]


def test_without_the_optional_package():
    """In a process that cannot import it, only requests with a grammar are refused."""
    script = """
import sys
sys.modules["llguidance"] = None
from phalanx.errors import InvalidRequestError
from phalanx.models.causal_lm.validation import check_request
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.sampling import SamplingParams
check_request(GenerateRequest(prompt="x"), Limits())
try:
    check_request(GenerateRequest(prompt="x", sampling=SamplingParams(regex="a")), Limits())
except InvalidRequestError as error:
    print(error.field, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("regex ")
    assert "pip install phalanx[structured]" in done.stdout


def test_at_most_one_grammar():
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        SamplingParams(regex="a", json_schema="{}")


def test_without_a_tokenizer(tiny_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_dir / name)
    drive = Drive(load(tmp_path))
    drive.start(
        "a", GenerateRequest(input_ids=(5,), detokenize=False, sampling=SamplingParams(regex="a"))
    )
    drive.finish()
    assert "no tokenizer" in str(drive.error("a"))


def test_ids_alone(tiny):
    """Grammars need no text of the output."""
    asked = GenerateRequest(
        prompt="a", detokenize=False, sampling=SamplingParams(regex="the (sea|end)", n=2)
    )
    [output] = Drive(tiny).run(asked)
    for completion in output.completions:
        assert completion.text is None
        assert tiny.tokenizer.decode(completion.token_ids) in ("the sea", "the end")
