"""Prompts that end inside the last message, for the model to go on with it."""

import pytest

from phalanx.errors import InvalidRequestError
from phalanx.processing.text import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content CONTENT}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = CHATML.replace("CONTENT", "")
STRIPPING = CHATML.replace("CONTENT", "| trim ")
PARTS = (
    "{% for m in messages[1:] %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}[end]{% endfor %}"
)
BEFORE = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def continued(source: str, content: object) -> str:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    return ChatTemplate(source, {}).render(messages, continue_final_message=True)


@pytest.mark.parametrize("content", ["<", "e", ">", "|im_end|", "assistant", " trailing "])
def test_prompt_ends_with_the_content(content):
    # Most of these also stand in the markup that closes the message.
    assert continued(PLAIN, content) == BEFORE + content


@pytest.mark.parametrize("content", ["<", "e", ">", " trailing ", "line\n"])
def test_template_that_strips(content):
    assert continued(STRIPPING, content) == BEFORE + content.strip()


def test_last_text_part():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "e"}]
    assert continued(PARTS, parts) == "[assistant]ae"
    assert continued(PARTS, [*parts, {"type": "image"}]) == "[assistant]ae"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% for m in messages %}{{ m.role }} {% endfor %}", "user"),
        (PLAIN.replace("m.content ", "m.content[:2] "), "abc"),
        (PLAIN, ""),
        (PLAIN, " "),
        (PLAIN, None),
        (PLAIN, [{"type": "image"}]),
    ],
)
def test_text_that_is_not_rendered_cannot_be_continued(source, content):
    with pytest.raises(InvalidRequestError) as caught:
        continued(source, content)
    assert caught.value.field == "continue_final_message"


def test_no_message_to_continue():
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(PLAIN, {}).render([], continue_final_message=True)
    assert caught.value.field == "continue_final_message"
