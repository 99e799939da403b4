"""Chat templates of callers are rendered as the model's are, in a process that is ended where one takes too much."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.text.chat_template import render_chat
from frontend.text.request_templates import RequestTemplates
from ipc.errors import InvalidRequestError

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. \N{SNOWMAN}"},
    {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "count", "arguments": '{"n": 1.0, "m": null}'}}]},
]
TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}<{{ one.role }}>{{ one.content }}"
    "{{ one.tool_calls | default([]) | tojson }}{% endfor %}"
    "{{ tools | tojson }}{{ extra }}{{ documents is none }}{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: Steps that take more than the 20 ms of these tests, and much less than what is allowed else.
LONG = "{% for a in range(3000) %}{% for b in range(400) %}{% endfor %}{% endfor %}"


@pytest.fixture
def templates() -> Iterator[RequestTemplates]:
    templates = RequestTemplates()
    yield templates
    templates.close()


def test_the_prompt_is_the_same(templates: RequestTemplates) -> None:
    shared: dict[str, Any] = {"bos_token": "<s>", "eos_token": None, "image_mark": None}
    for arguments in (
        {"add_generation_prompt": True, "extra": 2.0, "tools": [{"type": "function", "function": {"name": "count"}}]},
        {"add_generation_prompt": False, "tools": None},
    ):
        wanted = render_chat(TEMPLATE, CHAT, **shared, **arguments)
        assert templates.render(TEMPLATE, CHAT, **shared, **arguments) == wanted
    assert "1.0" in wanted


@pytest.mark.parametrize("template", ["{% if %}", "{{ raise_exception('no') }}", "{{ messages + 1 }}"])
def test_refusals_are_the_same(templates: RequestTemplates, template: str) -> None:
    with pytest.raises(InvalidRequestError) as wanted:
        render_chat(template, CHAT)
    with pytest.raises(InvalidRequestError) as found:
        templates.render(template, CHAT)
    assert str(found.value) == str(wanted.value)


def test_one_that_takes_too_long_ends_alone() -> None:
    templates = RequestTemplates(max_cpu_ms=20)
    try:
        assert templates.render("{{ messages | length }}", CHAT) == "3"
        with pytest.raises(InvalidRequestError, match="more than 20 ms of CPU time"):
            templates.render(LONG, CHAT)
    finally:
        templates.close()


def test_one_that_takes_too_much_memory_ends_alone(templates: RequestTemplates) -> None:
    small = RequestTemplates(max_memory_bytes=8 << 20)
    try:
        with pytest.raises(InvalidRequestError, match=r"[Mm]emory"):
            small.render("{% set text = 'x' * 9000000 %}{{ text }}", CHAT)
    finally:
        small.close()
    assert templates.render("{{ 'x' * 9 }}", CHAT) == "x" * 9


def test_what_cannot_be_passed_is_refused(templates: RequestTemplates) -> None:
    for value in (2**70, object(), "\ud800"):
        with pytest.raises(InvalidRequestError, match="these messages cannot be passed"):
            templates.render(TEMPLATE, CHAT, extra=value)


def test_a_process_that_was_killed_is_followed(templates: RequestTemplates) -> None:
    assert templates.render("{{ 1 }}", CHAT) == "1"
    children = map(int, Path("/proc/thread-self/children").read_text().split())
    (process,) = [pid for pid in children if b"template_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(process, signal.SIGKILL)
    with pytest.raises(InvalidRequestError, match="was killed by SIGKILL"):
        templates.render("{{ 1 }}", CHAT)
    assert templates.render("{{ 1 }}", CHAT) == "1"
