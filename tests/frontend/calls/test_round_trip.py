"""What a family's chat template writes for an earlier call is what its models write: the scanner reads it back.

The templates are the calls' part of the public ones, shortened. The form is chosen from the template, as in a server.
"""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from frontend.calls.choose import choose_form
from frontend.calls.delta import fold
from frontend.calls.scanner import Scanner
from frontend.text.chat_template import render_chat
from frontend.text.tokenizer import Tokenizer
from tests.frontend.text.test_chat_tools import LLAMA, MISTRAL, QWEN

#: Qwen3-Coder's.
CODER = """{{ tools }}{%- for m in messages if m.role == 'assistant' %}<|im_start|>assistant
    {%- for call in m.tool_calls %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments|items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}<|im_end|>
{%- endfor %}"""
#: FunctionGemma's: strings between marks, keys bare.
GEMMA = """{{ tools }}{%- for m in messages if m.role == 'assistant' %}<start_of_turn>model
    {%- for call in m.tool_calls %}
        {{- '<start_function_call>call:' + call.function.name + '{' }}
        {%- for name, value in call.function.arguments|items %}
            {{- name + ':' }}{{- '<escape>' + value + '<escape>' if value is string else value | tojson }}
            {{- '' if loop.last else ',' }}
        {%- endfor %}
        {{- '}<end_function_call>' }}
    {%- endfor %}<end_of_turn>
{%- endfor %}"""
#: Gemma 4's.
GEMMA4 = (
    GEMMA.replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
    .replace("<escape>", '<|"|>')
)
#: gpt-oss': the receiver stands before the channel, and there is one call.
HARMONY = """{{ tools }}{%- for m in messages if m.role == 'assistant' %}<|start|>assistant
    {%- set call = m.tool_calls[0].function %}
    {{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson }}<|call|>
{%- endfor %}"""

#: Name -> template, special tokens, the text before an answer, and the text that ends it.
FAMILIES = {
    "qwen": ("{{ tools }}" + QWEN, (), "<|im_start|>assistant\n", "<|im_end|>"),
    "llama": ("{{ tools }}" + LLAMA, ("<|python_tag|>",), "assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral": ("{{ tools }}[AVAILABLE_TOOLS]" + MISTRAL, ("[TOOL_CALLS]",), "[/INST]", "</s>"),
    "coder": (CODER, (), "<|im_start|>assistant\n", "<|im_end|>"),
    "functiongemma": (GEMMA, (), "<start_of_turn>model", "<end_of_turn>"),
    "gemma4": (GEMMA4, (), "<start_of_turn>model", "<end_of_turn>"),
    "harmony": (HARMONY, (), "<|start|>assistant", "<|call|>"),
}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    [("get_weather", {"city": "Köln", "days": 3})],
    [("get_weather", {"city": 'a "b" {c}, d\n<e>', "days": -1})],
    [("get_time", {})],
    [("get_weather", {"city": "", "days": 0}), ("get_time", {}), ("get_weather", {"city": "x", "days": 12})],
]


@pytest.mark.parametrize("calls", CALLS, ids=("one", "hard", "empty", "several"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_call_is_read_back(family: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    template, special, begin, end = FAMILIES[family]
    if family in ("llama", "harmony"):
        calls = calls[:1]  # their templates take one call of a message
    shown = [
        {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(calls)
    ]
    chat = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": None, "tool_calls": shown}]
    prompt = render_chat(template, chat, add_generation_prompt=False, bos_token="<s>", eos_token="</s>", tools=TOOLS)
    text = prompt.rpartition(begin)[2].partition(end)[0]
    hf = tokenizers.Tokenizer(models.BPE())
    hf.add_special_tokens(list(special))
    form = choose_form(Tokenizer(hf, chat_templates={"default": template}))
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for size in (len(text), 1, 7):
        scanner = Scanner(form, schemas)
        pieces = [delta for at in range(0, len(text), size) for delta in scanner.feed(text[at : at + size])]
        message = fold([*pieces, *scanner.finish()])
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls, text
        assert message.content.strip() == ""
