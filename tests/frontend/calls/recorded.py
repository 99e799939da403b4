"""Answers in each format, as the formats' public documentation writes them, and what they mean."""

from typing import Any, NamedTuple

from frontend.calls.formats import CALL_FORMATS, REASONING_FORMATS, AnswerForm

WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "get_time": {"type": "object"}}
PARIS: dict[str, Any] = {"city": "Paris"}

THINK = REASONING_FORMATS["qwen3"]
HERMES = AnswerForm(CALL_FORMATS["hermes"])
QWEN3 = AnswerForm(CALL_FORMATS["hermes"], THINK)
LLAMA = AnswerForm(CALL_FORMATS["llama3_json"])
MISTRAL = AnswerForm(CALL_FORMATS["mistral"])
PYTHON = AnswerForm(CALL_FORMATS["pythonic"])
GEMMA = AnswerForm(CALL_FORMATS["functiongemma"])
GEMMA4 = AnswerForm(CALL_FORMATS["gemma4"], REASONING_FORMATS["gemma4"])
XML = AnswerForm(CALL_FORMATS["qwen3_coder"], THINK)
HARMONY = AnswerForm(is_harmony=True)


class Recorded(NamedTuple):
    """One answer. calls: name and parsed arguments."""

    form: AnswerForm
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""
    in_reasoning: bool = False


RECORDED = [
    Recorded(
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [("get_weather", PARIS)],
    ),
    Recorded(
        HERMES,
        'I will look.\n<tool_call>\n{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        [("get_weather", {"city": "Paris", "days": 2}), ("get_time", {})],
        content="I will look.",
    ),
    Recorded(
        QWEN3,
        "<think>\nThe user asks for the weather.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Pa\\u0072is </tool_call> \\"x\\""}}\n</tool_call>',
        [("get_weather", {"city": 'Paris </tool_call> "x"'})],
        reasoning="The user asks for the weather.",
    ),
    Recorded(QWEN3, "thinking\n</think>\n\nHello\n", [], "Hello\n", "thinking", in_reasoning=True),
    Recorded(QWEN3, "<think>\n\n</think>\n\nHello", [], "Hello"),
    Recorded(  # SmolLM2's list
        HERMES,
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]'
        "</tool_call>",
        [("get_weather", PARIS), ("get_time", {})],
    ),
    Recorded(
        HERMES,  # OpenAI's own nesting, arguments as a string of JSON, no arguments, one bracket too many
        '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}'
        '</tool_call><tool_call>{"name": "get_time"}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": null}}</tool_call>',
        [("get_weather", PARIS), ("get_time", {}), ("get_time", {})],
    ),
    Recorded(
        HERMES,  # line ends within a string, and text behind the call
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa\nris"}}</tool_call>\n\nDone.',
        [("get_weather", {"city": "Pa\nris"})],
        content="Done.",
    ),
    Recorded(LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', [("get_weather", PARIS)]),
    Recorded(
        LLAMA,
        '\n<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {}}',
        [("get_weather", PARIS), ("get_time", {})],
    ),
    Recorded(LLAMA, '{"name": "Alice", "parameters": {}}', [], content='{"name": "Alice", "parameters": {}}'),
    Recorded(
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]',
        [("get_weather", PARIS)],
    ),
    Recorded(
        MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]a1b2c3d4e[ARGS]{}',
        [("get_weather", PARIS), ("get_time", {})],
    ),
    Recorded(MISTRAL, 'Well: [TOOL_CALLS]get_weather{"city": "Paris"}', [("get_weather", PARIS)], content="Well:"),
    Recorded(
        PYTHON,
        "[get_weather(city='Paris', days=-2), get_time()]",
        [("get_weather", {"city": "Paris", "days": -2}), ("get_time", {})],
    ),
    Recorded(PYTHON, '```tool_code\n[get_weather(city="Pa)r]i\'s")]\n```', [("get_weather", {"city": "Pa)r]i's"})]),
    Recorded(PYTHON, "[1, 2, 3]", [], content="[1, 2, 3]"),
    Recorded(
        GEMMA,
        "<start_function_call>call:get_weather{city:<escape>Par, {is}<escape>,days:2}<end_function_call>",
        [("get_weather", {"city": "Par, {is}", "days": 2})],
    ),
    Recorded(
        GEMMA4,
        '<|channel>thought\nIt asks.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,more:{a:[1,true,'
        '<|"|>x<|"|>],b:{}}}<tool_call|>',
        [("get_weather", {"city": "Paris", "more": {"a": [1, True, "x"], "b": {}}})],
        reasoning="It asks.",
    ),
    Recorded(
        XML,
        "Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "12", "days": 3})],
        content="Yes.",
    ),
    Recorded(
        HARMONY,
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        [("get_weather", PARIS)],
        reasoning="Need the weather.",
    ),
    Recorded(
        HARMONY,
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>First both."
        '<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}'
        "<|call|><|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|><|call|>",
        [("get_weather", PARIS), ("get_time", {})],
        content="First both.",
        reasoning="Two.",
    ),
    Recorded(
        HARMONY,
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        [],
        content="2 + 2 = 4.",
        reasoning="2 + 2.",
    ),
]
