"""render_chat against transformers' own rendering, and what it refuses."""

import datetime
import enum
from typing import Any

import numpy as np
import pytest

from frontend.text import chat_template
from frontend.text.chat_template import render_chat
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError
from ipc.files.model_files import read_tokenizer_files, resolve_model

#: Llama-like: whitespace control, trim, set, namespace, raise_exception, tools as JSON, a generation block.
LLAMA_LIKE = """{{- bos_token }}
{%- set ns = namespace(seen=0) %}
{%- if tools %}
    {{- "Tools: " + tools | tojson(indent=2) }}
{%- endif %}
{% for message in messages %}
    {% if message.role not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('unknown role ' + message.role) }}
    {% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
[{{ message['role'] | upper }} {{ ns.seen }}] {{ message['content'] | trim }}
    {% endif %}
    {% if loop.index > 4 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
[ASSISTANT]
{% endif %}
{% if thinking is defined and thinking %}<think>{% endif %}{{ documents }}"""

#: Takes content as a string or as a list of parts.
PARTS = """{%- for message in messages %}<|{{ message.role }}|>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}({{ part.text }}){% endfor %}
{%- endif %}{{ message.name }}{{ message.tool_calls | tojson if message.tool_calls else '' }}{% endfor %}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be <brief> & 'kind'. "}, {"role": "user", "content": "\n你好 👋🏽\n"}],
    [{"role": role, "content": f"{role} {n}"} for n in range(4) for role in ("user", "assistant")],
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, 2.5, None, True, "<x>"]}}}]


@pytest.fixture(scope="module")
def smollm2_template() -> str:
    template = Tokenizer.from_files(read_tokenizer_files(resolve_model(None))).chat_template
    assert template is not None
    return template


def _oracle(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("chat", CHATS, ids=["one", "system", "long"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [None, LLAMA_LIKE, PARTS], ids=["smollm2", "llama-like", "parts"])
def test_equals_transformers(smollm2_template: str, template: str | None, chat: Any, prompt: bool) -> None:
    template = template or smollm2_template
    variables = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>", "tools": TOOLS}
    rendered = render_chat(template, chat, **variables)
    assert rendered == _oracle(template, chat, **variables)
    assert chat[0]["content"].strip() in rendered


def test_further_variables(smollm2_template: str) -> None:
    variables = {"thinking": True, "documents": [{"title": "a"}], "bos_token": "<s>"}
    rendered = render_chat(LLAMA_LIKE, CHATS[0], **variables)
    assert rendered == _oracle(LLAMA_LIKE, CHATS[0], add_generation_prompt=True, **variables)
    assert "<think>[{'title': 'a'}]" in rendered


def test_missing_special_tokens_print_as_nothing() -> None:
    assert render_chat("{{ bos_token }}|{{ eos_token }}", CHATS[0], bos_token=None) == "|"


def test_parts_are_kept_for_a_template_that_loops_over_them_and_joined_for_others(smollm2_template: str) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render_chat(PARTS, chat) == _oracle(PARTS, chat) == "<|user|>(a)(b)"
    joined = [{"role": "user", "content": "a\nb"}]
    assert render_chat(smollm2_template, chat) == render_chat(smollm2_template, joined)
    split = "{% for line in messages[0].content.split('\\n') %}<{{ line }}>{% endfor %}"
    assert render_chat(split, chat) == "<a><b>", "a loop over something made of the content takes strings"


def test_tool_calls_may_stand_for_content() -> None:
    chat = [{"role": "assistant", "content": None, "name": "x", "tool_calls": [{"id": 1}]}]
    assert render_chat("{{ messages[0].name }}{{ messages[0].tool_calls | tojson }}", chat) == 'x[{"id": 1}]'


def test_strftime_now() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", CHATS[0]) in {str(datetime.date.today().year + d) for d in (-1, 0)}


def test_caller_objects_become_plain_data_and_stay_unchanged() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    class Loud(str):
        def upper(self) -> str:
            raise AssertionError("a caller's method ran")

    chat = [{"role": Role.USER, "content": Loud("hi"), "score": np.float64(0.5)}]
    template = "{{ messages[0].role }} {{ messages[0].content | upper }} {{ messages[0].score }}"
    assert render_chat(template, chat) == "user HI 0.5"
    assert type(chat[0]["content"]) is Loud
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] must be plain data.*got object"):
        render_chat(template, [{"role": "user", "content": "x", "extra": object()}])
    with pytest.raises(InvalidRequestError, match="chat template arguments must be plain data"):
        render_chat(template, CHATS[0], hook=print)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one entry"),
        ("hello", "messages must be a list"),
        (["hello"], r"messages\[0\] must be a dict"),
        ([CHATS[0][0], {"content": "x"}], r"messages\[1\]\[\"role\"\] must be a str .* got None"),
        ([{"role": 3, "content": "x"}], "got 3"),
        ([{"role": "user"}], r"\"content\"\] must be a str or a list"),
        ([{"role": "user", "content": 5}], "got 5"),
        ([{"role": "user", "content": [5]}], "part that is not"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text only"),
    ],
)
def test_bad_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render_chat(PARTS, messages)


def test_model_without_template() -> None:
    with pytest.raises(InvalidRequestError, match=r"no chat template.*generate\(\)"):
        render_chat(None, CHATS[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 3 }}", "can only concatenate str"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'.* is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append'.* is unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 'x' * 10 ** 12 }}", r"result of \* would have size 1000000000000; .* 16777216 is allowed"),
        ("{{ 10 ** (10 ** 9) }}", r"result of \*\* would have size 4000000000"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for m in messages %}", "not valid Jinja .line 1.: Unexpected end of template"),
        ("{% include 'other' %}", "no loader"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not valid Jinja"),
    ],
)
def test_template_that_fails(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render_chat(template, CHATS[0])


@pytest.mark.parametrize(
    "expression",
    [
        "'%0999999999d' % 1",
        "'%.999999999f' % 1",
        "'%*d' % (999999999, 1)",
        "'%((a))999999999d' % {'(a)': 1}",
        "'%s' | format('x' * 9000000) | replace('x', 'yy')",
        "'%999999999s' | format('x')",
        "'%(a)999999999s' | format(a='x')",
        "'x' | center(999999999)",
        "'x'.center(999999999)",
        "'x'.ljust(999999999)",
        "'x'.rjust(999999999)",
        "'x'.zfill(999999999)",
        "'\t'.expandtabs(999999999)",
        "'{:>999999999}'.format('x')",
        "'{:{}}'.format('x', 999999999)",
        "'{a:>999999999}'.format_map({'a': 'x'})",
        "'x' | indent(999999999, true)",
        "'x' * 9000000 + 'x' * 9000000",
        "'x' * 9000000 ~ 'x' * 9000000",
        "['x' * 9000000, 'x' * 9000000] | join",
        "([{'a': 'x' * 9000000}] * 2) | join(attribute='a')",
        "('x' * 9000000).join(['', '', ''])",
        "('x' * 9000).replace('x', 'x' * 9000)",
        "[1] | tojson(indent=999999999)",
    ],
)
def test_what_one_expression_makes_is_bounded(expression: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"in a template at most \d+ is|templates may|in a template it must"):
        render_chat("{% if (" + expression + ") | length %}{% endif %}", CHATS[0], n=1)


def test_ordinary_formatting_is_allowed() -> None:
    template = (
        "{{ '%05.1f|%s%%' % (1.25, 'a') }}{{ '%s-%s' | format(1, 'b') }}{{ '{:>3}{}'.format('c', 1) }}"
        "{{ 'd'.ljust(2) }}"
        "{{ 'e' | center(3) }}{{ 'f\n' | indent(2, true) }}{{ 1 ~ 'g' }}{{ [1, 'h'] | join('+') }}{{ 7 % 4 }}"
        "{{ 'i' | replace('i', 'j') }}{{ [{'k': 1}] | join('', attribute='k') }}"
    )
    assert render_chat(template, CHATS[0]) == "001.2|a%1-b  c1d  e   f\n1g1+h3j1"


def test_small_arithmetic_is_allowed() -> None:
    assert render_chat("{{ '-' * 3 }}{{ 4 * 5 }}{{ 2 ** 10 }}{{ 2 ** 0.5 > 1 }}", CHATS[0]) == "---201024True"


def test_rendered_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARS", 100)
    template = "{% for i in range(n) %}0123456789{% endfor %}"
    assert len(render_chat(template, CHATS[0], n=10)) == 100
    with pytest.raises(InvalidRequestError, match="longer than 100 characters"):
        render_chat(template, CHATS[0], n=11)


def test_a_template_is_compiled_once(smollm2_template: str) -> None:
    chat_template.compile_template.cache_clear()
    for _ in range(3):
        render_chat(smollm2_template, CHATS[0])
    assert chat_template.compile_template.cache_info().misses == 1
