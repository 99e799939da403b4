"""Messages as OpenAI's clients send them, in prompts of templates that know less: developers, kinds of parts."""

from typing import Any

import pytest

from frontend.text.chat_template import render_chat
from ipc.errors import InvalidRequestError

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
#: As Qwen 3.5's: a system message must be the first.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% elif m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('Unexpected message role.') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
#: As gpt-oss': the first message is the developer's; later ones of these roles are not shown.
HARMONY = (
    "{% if messages[0].role in ('developer', 'system') %}<dev>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def system(text: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_developer_messages_are_the_system_message_of_a_template_that_does_not_know_them(template: str) -> None:
    assert render_chat(template, [system("a", "developer"), USER]) == "<system>a<user>hi"
    assert render_chat(template, [system("a"), system("b", "developer"), USER]) == "<system>a\n\nb<user>hi"
    parts = [{"type": "input_text", "text": "b"}, {"type": "text", "text": "c"}]
    later = [system("a"), USER, system(parts, "developer"), USER]
    assert render_chat(template, later) == "<system>a\n\nb\nc<user>hi<user>hi"


def test_a_template_that_knows_the_role_gets_all_of_the_beginning_at_once() -> None:
    assert render_chat(HARMONY, [system("a", "developer"), USER]) == "<dev>a<user>hi"
    assert render_chat(HARMONY, [system("a"), system("b", "developer"), USER]) == "<dev>a\n\nb<user>hi"


def test_messages_without_developers_are_left_as_they_are() -> None:
    assert render_chat(CHATML, [system("a"), system("b"), USER]) == "<system>a<system>b<user>hi"


def test_kinds_of_parts() -> None:
    parts = ["a", {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert render_chat(CHATML, [system(parts)]) == "<system>a\nb\nc"
    takes_parts = "{% for m in messages %}{% for p in m.content %}[{{ p.type }} {{ p.text }}]{% endfor %}{% endfor %}"
    assert render_chat(takes_parts, [system(parts)]) == "[text a][text b][text c]"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "refusal", "text": "c"}, 3, {"type": []}):
        with pytest.raises(InvalidRequestError, match=r'messages\[0\]\["content"\] has a part'):
            render_chat(CHATML, [system([part])])


def test_an_answer_without_content_is_empty() -> None:
    assert render_chat(CHATML, [USER, {"role": "assistant"}, USER]) == "<user>hi<assistant><user>hi"
    with pytest.raises(InvalidRequestError, match=r'messages\[0\]\["content"\] must be'):
        render_chat(CHATML, [{"role": "user"}])
