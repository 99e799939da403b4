"""continue_final_message: the prompt ends with the last message's text, whatever the template puts behind it."""

import pytest

from frontend.text.chat_template import render_chat
from ipc.errors import InvalidRequestError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " The answer "}]


def test_the_prompt_ends_with_the_text() -> None:
    prompt = render_chat(TEMPLATE, CHAT, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "<user>Hi<end><assistant> The answer "
    assert CHAT[1]["content"] == " The answer "


@pytest.mark.parametrize(
    ("template", "messages", "add", "text"),
    [
        (TEMPLATE, CHAT, True, "exclude each other"),
        (TEMPLATE, [{"role": "user", "content": None}], False, "content is a str"),
        (TEMPLATE, [], False, "content is a str"),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", CHAT, False, "does not show"),
    ],
)
def test_what_cannot_be_continued(template: str, messages: list, add: bool, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        render_chat(template, messages, add_generation_prompt=add, continue_final_message=True)
