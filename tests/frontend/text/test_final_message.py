"""continue_final_message: the prompt ends with the last message's text, whatever the template puts behind it."""

import pytest

from frontend.text.chat_template import render_chat
from ipc.errors import InvalidRequestError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " The answer "}]


def test_the_prompt_ends_with_the_text() -> None:
    prompt = render_chat(TEMPLATE, CHAT, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "<user>Hi<end><assistant>The answer"  # the template trims it
    plain = TEMPLATE.replace(" | trim", "")
    prompt = render_chat(plain, CHAT, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "<user>Hi<end><assistant> The answer "
    assert CHAT[1]["content"] == " The answer "


#: Templates that look at the text: trimmed, taken apart where reasoning ends, with an empty thought before it if it has
#: none, and of content parts.
LOOKING = [
    TEMPLATE,
    TEMPLATE.replace(" | trim", ""),
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if '</think>' in m.content %}{{ m.content }}"
    "{% else %}<think></think>{{ m.content }}{% endif %}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].lstrip('\\n') }}<end>{% endfor %}",
]


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
@pytest.mark.parametrize("template", LOOKING)
@pytest.mark.parametrize("text", ["Hello", " Hello  ", "<think>\nx\n</think>\n\nHello", "a<end>b"])
def test_prompts_are_those_of_transformers(template: str, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    try:
        (theirs,), _ = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    except ValueError:
        theirs = None
    if theirs is None:
        with pytest.raises(InvalidRequestError, match="does not show the last message's content"):
            render_chat(template, messages, add_generation_prompt=False, continue_final_message=True)
    else:
        assert render_chat(template, messages, add_generation_prompt=False, continue_final_message=True) == theirs


def test_the_last_text_of_content_parts_goes_on() -> None:
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}<end>{% endfor %}"
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    prompt = render_chat(
        template, [{"role": "assistant", "content": parts}], add_generation_prompt=False, continue_final_message=True
    )
    assert prompt == "a;b"


@pytest.mark.parametrize(
    ("template", "messages", "add", "text"),
    [
        (TEMPLATE, CHAT, True, "cannot be combined"),
        (TEMPLATE, [{"role": "user", "content": None}], False, "content is a str"),
        (TEMPLATE, [{"role": "user", "content": [{"type": "image"}]}], False, "content is a str or has a part"),
        (TEMPLATE, [], False, "content is a str"),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", CHAT, False, "does not show"),
    ],
)
def test_what_cannot_be_continued(template: str, messages: list, add: bool, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        render_chat(template, messages, add_generation_prompt=add, continue_final_message=True)
