"""Tool calls in chats, as OpenAI's clients write them, against transformers on arguments that are mappings."""

import copy
import json
from typing import Any

import pytest

from frontend.text.chat_template import render_chat
from ipc.errors import InvalidRequestError

#: Qwen 2.5's and Hermes' way, shortened.
QWEN = """{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}"""

#: Llama 3.1's: the presence of tool_calls is a call.
LLAMA = """{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}"""

#: Mistral's, version 3: the whole function as JSON.
MISTRAL = """{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content|trim + eos_token}}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}"""

#: Qwen3-Coder's: one element for each argument.
CODER = """{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '<function=' + tool_call.function.name + '>' }}
        {%- for name, value in tool_call.function.arguments|items %}
            {{- '<parameter=' + name + '>' }}{{ value | tojson if value is mapping else value | string }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}"""

#: DeepSeek V3's: a call is what has content none, and its arguments are put into a text.
DEEPSEEK = """{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}
        {%- endfor %}
    {%- else %}
        {{- '<' + message['role'] + '>' + message['content'] }}
    {%- endif %}
{%- endfor %}"""

MAPPINGS = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "coder": CODER}
ARGUMENTS = ['{"city": "Köln", "days": 3, "units": null}', '{ "a": {"b": [1, 2.5, true]},\n"c": "x\\n\\"y\\"" }', "{}"]


def chat(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call], **message},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "12"},
        {"role": "assistant", "content": "Fine."},
    ]


def oracle(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, eos_token="</s>", bos_token="<s>")
    return str(rendered[0])


def render(template: str, messages: list[dict[str, Any]]) -> str:
    return render_chat(template, messages, add_generation_prompt=False, eos_token="</s>", bos_token="<s>")


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", MAPPINGS)
def test_arguments_as_text_become_a_mapping(name: str, arguments: str) -> None:
    given = chat(arguments)
    before = copy.deepcopy(given)
    expected = oracle(MAPPINGS[name], chat(json.loads(arguments)))
    assert render(MAPPINGS[name], given) == expected
    assert given == before
    assert render(MAPPINGS[name], chat(json.loads(arguments))) == expected


def test_a_template_that_takes_text_gets_the_text() -> None:
    for arguments in ARGUMENTS:
        assert render(DEEPSEEK, chat(arguments)) == oracle(DEEPSEEK, chat(arguments))
        assert arguments in render(DEEPSEEK, chat(arguments))
    with pytest.raises(InvalidRequestError, match="can only concatenate str"):
        render(DEEPSEEK, chat({"a": 1}))


@pytest.mark.parametrize("arguments", [None, "", " \n"])
@pytest.mark.parametrize("name", MAPPINGS)
def test_a_call_without_arguments(name: str, arguments: str | None) -> None:
    assert render(MAPPINGS[name], chat(arguments)) == oracle(MAPPINGS[name], chat({}))


def test_calls_with_the_functions_fields_directly() -> None:
    call, parsed = ({"name": "f", "arguments": arguments} for arguments in ('{"a": 1}', {"a": 1}))
    direct, expected = ([{"role": "assistant", "content": "", "tool_calls": [one]}] for one in (call, parsed))
    assert render(QWEN, direct) == oracle(QWEN, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"city": ', r'\["arguments"\] must be a dict or a JSON object as text: .*; got \'{"city": '),
        ("Köln", "must be a dict or a JSON object as text: Expecting value"),
        ("[1]", r"must be a dict or a JSON object as text; got '\[1\]'"),
        ('"text"', "must be a dict or a JSON object as text; got"),
        ("[" * 100_000, "must be a dict or a JSON object as text"),
    ],
)
def test_arguments_that_are_no_object(arguments: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=r'^messages\[1\]\["tool_calls"\]\[0\]\["function"\].*' + message):
        render(QWEN, chat(arguments))


@pytest.mark.parametrize("calls", ["f()", {"function": {}}, ["f"], 3])
def test_tool_calls_of_another_form(calls: object) -> None:
    with pytest.raises(InvalidRequestError, match=r'^messages\[1\]\["tool_calls"\] must be a list'):
        render(QWEN, chat("{}", tool_calls=calls))


@pytest.mark.parametrize("calls", [None, []])
@pytest.mark.parametrize("name", MAPPINGS)
def test_no_calls_are_no_calls(name: str, calls: object) -> None:
    """OpenAI's clients write None; Llama's template takes any for a call."""
    without = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render(MAPPINGS[name], [without[0], {**without[1], "tool_calls": calls}]) == oracle(MAPPINGS[name], without)


def test_content_beside_calls() -> None:
    """None and absent are the same: None for templates that ask, "" for others, which would print None."""
    absent = chat("{}")
    del absent[1]["content"]
    for given in (chat("{}"), absent):
        assert render(DEEPSEEK, given) == oracle(DEEPSEEK, chat("{}"))
        assert "None" not in render("{{ messages[1].content }}{{ messages[1]['content'] | trim }}", given)
        for question in ("messages[1].content is none", "messages[1]['content'] == None", "content is not none"):
            template = "{% set content = messages[1].content %}{{ " + question + " }}"
            assert render(template, given) == oracle(template, chat("{}"))
    assert render(QWEN, chat("{}", content="Let me see.")) == oracle(QWEN, chat({}, content="Let me see."))


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_no_content_is_an_empty_text(role: str) -> None:
    for template in (QWEN, LLAMA, "{{ messages[0].content }}", "{{ messages[0].content is none }}"):
        empty, none = ([{"role": role, "content": content}] for content in ("", None))
        assert render(template, none) == oracle(template, empty)
        assert none[0]["content"] is None


def test_results_of_tools_in_parts_are_joined() -> None:
    """Templates that loop over a user's parts print a tool's."""
    template = (
        "{% for message in messages %}{% if message.role == 'tool' %}<{{ message.content }}>"
        "{% else %}{% for part in message.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": role, "content": copy.deepcopy(parts)} for role in ("user", "tool")]
    assert render(template, given) == "(a)(b)<a\nb>"
    assert given[1]["content"] == parts
