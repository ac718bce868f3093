"""Prompts and their tokens."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from phalanx.errors import CheckpointError, ConfigurationError, InvalidRequestError
from phalanx.processing.policy.newline_prompt import NewlinePrompt
from phalanx.processing.policy.prompt_tokenizer import PromptTokenizer
from phalanx.processing.policy.state_prompt import StatePrompt, StatePromptSettings
from phalanx.processing.policy.tokenizer_files import find_tokenizer
from phalanx.processing.policy.transition import Transition
from tests.processing.policy.references import POLICIES

TOKENIZER = POLICIES / "pi05_micro_f32" / "tokenizer"


def test_bins_of_the_state_have_their_own_numbers_at_both_ends():
    state = torch.tensor([[-1.1, -1.0, 0.0, 0.999, 1.0, 7.0]])
    step = StatePrompt(StatePromptSettings())
    [text] = step(Transition({"observation.state": state}, (" pick_up\nit ",))).tasks
    assert text == "Task: pick up it, State: -1 0 128 255 255 255;\nAction: "


def test_a_prompt_of_the_state_needs_one():
    with pytest.raises(InvalidRequestError, match="no state"):
        StatePrompt(StatePromptSettings())(Transition({}, ("fold",)))


@pytest.mark.parametrize(("task", "wanted"), [("fold", "fold\n"), ("fold\n", "fold\n")])
def test_a_newline_ends_the_task_once(task, wanted):
    step = NewlinePrompt("pi0_new_line_processor")
    assert step(Transition(tasks=(task,))).tasks == (wanted,)


def test_ids_are_padded_at_the_right_and_cut_at_the_end():
    tokenizer = PromptTokenizer(TOKENIZER, length=6)
    ids, masks = tokenizer.encode(["ab", "abcdefghijk"])
    assert [len(row) for row in ids] == [6, 6]
    assert ids[0][0] == ids[1][0] == 2 and ids[0][3:] == [0, 0, 0]
    assert masks == [[1, 1, 1, 0, 0, 0], [1] * 6]


def test_ids_may_be_padded_to_the_longest_at_the_left():
    tokenizer = PromptTokenizer(TOKENIZER, length=9, pad_to_length=False, side="left")
    ids, masks = tokenizer.encode(["a", "abc"])
    assert [len(row) for row in ids] == [4, 4] and masks[0] == [0, 0, 1, 1]


def test_a_prompt_that_must_not_be_cut_is_refused():
    tokenizer = PromptTokenizer(TOKENIZER, length=4, truncate=False)
    with pytest.raises(InvalidRequestError, match=r"12 tokens.*takes 4"):
        tokenizer.encode(["abcdefghijk"])


@pytest.mark.parametrize(("says", "begins"), [(None, True), (False, False)])
def test_gemmas_prompts_begin_with_its_token_whatever_the_file_says(tmp_path, says, begins):
    content = json.loads((TOKENIZER / "tokenizer.json").read_text())
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "pad_token": "<pad>"}
    if says is not None:
        config["add_bos_token"] = says
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids, _ = PromptTokenizer(tmp_path, length=4).encode(["a"])
    assert (ids[0][0] == 2) is begins


def test_the_tokenizer_is_the_given_one_or_that_of_the_checkpoint(tmp_path):
    checkpoint, given = tmp_path / "checkpoint", tmp_path / "given"
    checkpoint.mkdir()
    with pytest.raises(CheckpointError, match=r"the tokenizer 'a/b' and say where .*tokenizer_dir"):
        find_tokenizer(checkpoint, None, "a/b")
    with pytest.raises(ConfigurationError, match="tokenizer_dir"):
        find_tokenizer(checkpoint, given, None)
    shutil.copytree(TOKENIZER, checkpoint / "saved")
    assert find_tokenizer(checkpoint, None, "a/b") == checkpoint / "saved"
    shutil.copytree(TOKENIZER, checkpoint / "a" / "b")
    assert find_tokenizer(checkpoint, None, "a/b") == checkpoint / "a" / "b"
    shutil.copy(TOKENIZER / "tokenizer.json", checkpoint)
    assert find_tokenizer(checkpoint, None, "a/b") == checkpoint
    shutil.copytree(TOKENIZER, given)
    assert find_tokenizer(checkpoint, given, "a/b") == given


def test_a_name_that_leads_out_of_the_checkpoint_is_not_followed(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shutil.copytree(TOKENIZER, tmp_path / "other")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        find_tokenizer(checkpoint, None, "../other")
