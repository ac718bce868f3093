"""Tokenizer directories: what they give, and what is said about broken ones."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import CheckpointError, InvalidRequestError
from phalanx.processing.text import ChatTemplate, TextTokenizer
from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer

USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_round_trip(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert tokenizer.decode(tokenizer.encode("Grüße 北京 12")) == "Grüße 北京 12"


def test_special_tokens_in_front_only_where_wanted(tokenizers):
    tokenizer = tokenizers["byte_fallback"]
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("the", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_token_bytes(tokenizers):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("北", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).strip() == "北".encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_eos_ids_are_those_of_all_files(tmp_path: Path):
    write_byte_level_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert TextTokenizer(tmp_path).eos_token_ids == (0, 2, 7)


def test_pickled_by_directory(byte_level):
    again = pickle.loads(pickle.dumps(byte_level))
    assert again.encode("Paris") == byte_level.encode("Paris")
    template = byte_level.chat_template
    assert pickle.loads(pickle.dumps(template)).render([USER]) == template.render([USER])


def test_missing_tokenizer_names_the_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        TextTokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_truncated_file_is_named(tmp_path: Path, name: str):
    write_byte_level_tokenizer(tmp_path)
    file = tmp_path / name
    text = file.read_text() if file.exists() else '{"a": 1}'
    file.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        TextTokenizer(tmp_path)


def test_chat_prompt(byte_level):
    assert byte_level.render_chat([USER]) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_final_message_is_left_open_to_continue(byte_level):
    messages = [USER, {"role": "assistant", "content": "The answer "}]
    prompt = byte_level.render_chat(messages, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nThe answer ")


def test_chat_without_template_is_refused(tmp_path: Path):
    write_byte_level_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        TextTokenizer(tmp_path).render_chat([USER])


def test_template_file_and_named_templates(tmp_path: Path):
    write_byte_level_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert TextTokenizer(tmp_path).render_chat([USER]) == "D"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    assert TextTokenizer(tmp_path).render_chat([USER]) == "user"


class FixedClock:
    def monotonic_s(self) -> float:
        return 0.0

    def wall_s(self) -> float:
        return 1_700_000_000.0


def test_template_environment():
    source = (
        "{{ bos_token }}{{ tools | tojson }}{{ strftime_now('%Y') }}"
        "{% generation %}{{ kind }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, FixedClock())
    text = template.render([USER, USER], tools=[{"name": "<ü>"}], variables={"kind": "k"})
    assert text == '<s>[{"name": "<ü>"}]2023kHello'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 + 'a' }}",
    ],
)
def test_template_that_refuses_or_misbehaves_is_the_requests_error(source):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        ChatTemplate(source, {}).render([USER])
    assert caught.value.field == "messages"


def test_loads_without_torch_and_transformers():
    code = (
        "import sys, phalanx.processing.text as t; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
