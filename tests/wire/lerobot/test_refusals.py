"""No pickle of the corpus does anything: each is refused, in bounded memory and without a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.wire.lerobot import decode_actions, decode_observation, decode_policy_instructions
from tests.wire.fuzzing import taking_at_most
from tests.wire.lerobot.malicious import CORPUS, MARKER
from tests.wire.lerobot.pickles import config, features, recorded, trusted


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """Commands that run would leave their mark here."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("decode", [decode_observation, decode_policy_instructions, decode_actions])
def test_malicious_pickles_are_refused(name, decode):
    data = CORPUS[name]
    if (name, decode) == ("another_record", decode_policy_instructions):
        return
    with taking_at_most(8 << 20), pytest.raises(MalformedRequestError):
        decode(data)


@pytest.mark.parametrize("name", ["os_system_0", "os_system_4", "eval_5", "in_an_observation"])
def test_the_corpus_does_what_it_should_where_it_is_unpickled(name):
    # With Python's own unpickler, to see that the refusals are of something.
    trusted(CORPUS[name])
    Path(MARKER).unlink()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"actions_per_chunk": 0}, "actions_per_chunk=0 must be from 1"),
        ({"actions_per_chunk": True}, "actions_per_chunk is no integer"),
        ({"pretrained_name_or_path": 3}, "pretrained_name_or_path is no text"),
        ({"rename_map": ["a"]}, "rename_map is no dictionary"),
        ({"lerobot_features": None}, "lerobot_features' is no dictionary"),
        ({"lerobot_features": features(("front", (4, 6)))}, "no shape of height"),
        ({"lerobot_features": features(("front", (4, -6, 3)))}, "no shape of height"),
        ({"lerobot_features": {"observation.state": {"names": [1]}}}, "no list of names"),
        ({"lerobot_features": {"observation.images.a": {"dtype": "x"}}}, "is no image"),
        (
            {"lerobot_features": features(*((f"c{n}", (1, 1, 3)) for n in range(33)))},
            "33 cameras",
        ),
    ],
)
def test_policy_instructions_are_refused_in_words(changed, words):
    with pytest.raises(InvalidRequestError, match=words):
        decode_policy_instructions(config(**changed))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("many_arrays_of_the_same_bytes", "arrays are larger than itself"),
        ("much_text", "too much text"),
        ("many_opcodes", "too many opcodes"),
        ("large_integer", "an integer has 255 bytes"),
        ("array_of_a_wrong_shape", "has 1 bytes, not 3"),
        ("array_of_a_huge_shape", "is too large"),
        ("claimed_bytes", "bytes too early"),
        ("storage_with_fewer_numbers", "1 numbers has 8 bytes, not 12"),
        ("tensor_of_a_repeated_number", "is not within its 1 numbers"),
        ("nested_storage_2", "names 'posix.system'"),
        ("storage_of_a_function", "names 'os.system'"),
        ("objects", "no plain number type"),
        ("persistent_id", "a persistent id is not allowed"),
        ("extension_1", "the opcode 0x82 is not allowed"),
        ("os_system_0", "no pickle"),
    ],
)
def test_each_is_refused_for_what_it_does(name, words):
    with pytest.raises(MalformedRequestError, match=words):
        decode_observation(CORPUS[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aliased_texts", "'lerobot_features' has texts of more than 1048576 characters"),
        ("aliased_keys", "'lerobot_features' has texts of more than"),
        ("aliased_renaming", "'rename_map' has texts of more than"),
        ("aliased_between_fields", "'lerobot_features' has texts of more than"),
        ("aliased_names", "pretrained_name_or_path has 900000 characters; at most 4096"),
        ("large_instructions", "have 5243.* bytes; LeRobot's client sends 4194304 at most"),
    ],
)
def test_one_text_cannot_be_copied_many_times(name, words):
    assert len(CORPUS[name]) < 6 << 20
    with pytest.raises(MalformedRequestError, match=words):
        decode_policy_instructions(CORPUS[name])


def test_the_message_says_what_was_named_and_where():
    with pytest.raises(MalformedRequestError, match=r"byte \d+: it names 'posix.system'"):
        decode_observation(CORPUS["os_system_4"])


def test_a_cut_pickle_says_so():
    with pytest.raises(MalformedRequestError, match="it ends within a frame of 14817 bytes"):
        decode_observation(recorded("timed_observation_variants")[:9000])
