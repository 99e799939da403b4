"""The scanner: recorded answers of each format, cut anywhere, and what is no call."""

import json
import random
import time
from itertools import pairwise

import pytest

from frontend.calls.delta import Delta, Kind, Message, Thought, fold
from frontend.calls.formats import AnswerForm
from frontend.calls.scanner import Scanner
from tests.frontend.calls import recorded
from tests.frontend.calls.recorded import HERMES, LLAMA, PYTHON, QWEN3, RECORDED, TOOLS, XML, Recorded

FORMS = sorted({one.form for one in RECORDED}, key=str)


def scan(
    form: AnswerForm,
    pieces: list[str],
    *,
    in_reasoning: bool = False,
    is_parallel: bool = True,
    thoughts: list[Thought] | None = None,
) -> list[Delta]:
    scanner = Scanner(form, TOOLS, in_reasoning=in_reasoning, is_parallel=is_parallel)
    deltas = [delta for piece in pieces for delta in scanner.feed(piece)]
    deltas += scanner.finish()
    assert scanner.finish() == []
    assert all(delta.text for delta in deltas)
    if thoughts is not None:
        thoughts += scanner.thoughts
    return deltas


def cut(text: str, places: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(places), len(text)])]


@pytest.mark.parametrize("one", RECORDED, ids=[f"{one.form.calls and one.form.calls.name}" for one in RECORDED])
def test_recorded_answers_whole_and_character_by_character(one: Recorded) -> None:
    for pieces in ([one.text], list(one.text), cut(one.text, [len(one.text) // 2])):
        thoughts = list[Thought]()
        message = fold(scan(one.form, pieces, in_reasoning=one.in_reasoning, thoughts=thoughts))
        assert message.reasoning == one.reasoning
        assert one.reasoning in "".join(one.text[thought.begin : thought.end] for thought in thoughts)
        assert message.content == one.content
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == one.calls


@pytest.mark.parametrize("form", FORMS, ids=[f"{form.calls and form.calls.name}" for form in FORMS])
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 60), *(pytest.param(seed, 2000, marks=pytest.mark.soak) for seed in range(1, 9))]
)
def test_any_text_in_any_pieces_is_the_fold_of_the_whole(form: AnswerForm, seed: int, count: int) -> None:
    """Mutated answers of all formats: cut, doubled, swapped and spliced with marks and brackets."""
    draw = random.Random(f"{form.calls and form.calls.name} {seed}")
    spices = ['"', "\\", "{", "}", "[", "]", "<", "</", ",", ":", "\n ", "\u2028", "<think>", "</think>", "name"]
    for _ in range(count):
        text = draw.choice([one.text for one in RECORDED if one.form == form or draw.random() < 0.1] or [""])
        for _ in range(draw.randrange(4)):
            a, b = sorted(draw.choices(range(len(text) + 1), k=2))
            other = draw.choice(RECORDED).text
            text = draw.choice([text[:a], text[:a] + text[b:], text[:b] + text[a:], text[:a] + other + text[b:]])
            text = text[:a] + draw.choice(spices) + text[a:]
        in_reasoning = draw.random() < 0.2
        thoughts = list[Thought]()
        whole = scan(form, [text], in_reasoning=in_reasoning, thoughts=thoughts)
        for pieces in (list(text), cut(text, draw.choices(range(len(text) + 1), k=draw.randrange(1, 6)))):
            found = list[Thought]()
            parts = scan(form, pieces, in_reasoning=in_reasoning, thoughts=found)
            assert merged(parts) == merged(whole), text
            assert found == thoughts, text


def merged(deltas: list[Delta]) -> list[Delta]:
    """The pieces with equal neighbours made one."""
    found: list[Delta] = []
    for one in deltas:
        if found and one.kind != Kind.CALL and (found[-1].kind, found[-1].call) == (one.kind, one.call):
            found[-1] = one._replace(text=found[-1].text + one.text)
        else:
            found.append(one)
    return found


def test_a_stream_shows_arguments_as_they_come() -> None:
    scanner = Scanner(HERMES, TOOLS)
    assert scanner.feed('<tool_call>{"name": "get_weather", "arguments": {"ci') == [
        Delta(Kind.CALL, "get_weather", 0),
        Delta(Kind.ARGUMENTS, '{"ci', 0),
    ]
    assert scanner.feed('ty": "Pa') == [Delta(Kind.ARGUMENTS, 'ty": "Pa', 0)]
    assert scanner.feed('ris"}}</tool_') == [Delta(Kind.ARGUMENTS, 'ris"}', 0)]
    assert scanner.feed("call>") == scanner.finish() == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no call</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather"',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "a <tool_call",
        "  text as it stands \n",
        "",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert fold(scan(HERMES, list(text))) == Message(content=text)


def test_broken_and_cut_arguments_are_delivered_as_text() -> None:
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call> Then.'
    message = fold(scan(HERMES, list(broken)))
    assert (message.calls[0].arguments, message.content) == ('{"city": Paris}', "Then.")
    unclosed = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"</tool_call> Then.'
    message = fold(scan(HERMES, list(unclosed)))
    assert (message.calls[0].arguments, message.content) == ('{"city": "Paris"', "Then.")
    message = fold(scan(HERMES, [unclosed[:60]]))
    assert message.calls[0].arguments.startswith('{"ci')


def test_calls_behind_the_first_are_dropped_where_one_is_wanted() -> None:
    text = RECORDED[1].text
    message = fold(scan(HERMES, list(text), is_parallel=False))
    assert [call.name for call in message.calls] == ["get_weather"]
    assert message.content == "I will look."


def test_a_second_call_that_is_none_is_content() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {}} {"nam"</tool_call>'
    message = fold(scan(HERMES, [text]))
    assert ([call.name for call in message.calls], message.content) == (["get_time"], '{"nam"')


def test_without_tools_calls_are_content_and_reasoning_is_told_apart() -> None:
    scanner = Scanner(QWEN3)
    text = "<think>a b </think>\n<tool_call>{}</tool_call>"
    message = fold([*scanner.feed(text), *scanner.finish()])
    assert message == Message("a b", "<tool_call>{}</tool_call>")


@pytest.mark.parametrize("text", ["{", "[", "<", '"', "\\", " ", "<think>", '<tool_call>{"a":', "call:a{b:"])
def test_work_is_linear(text: str) -> None:
    """10,000 characters in pieces of 8; quadratic work would take seconds."""
    for form in FORMS:
        for begin in ("", form.calls.begins[0] if form.calls else "<|channel|>"):
            scanner = Scanner(form, TOOLS)
            whole = begin + text * (10_000 // len(text))
            start = time.process_time()
            for at in range(0, len(whole), 8):
                scanner.feed(whole[at : at + 8])
            scanner.finish()
            assert time.process_time() - start < 1


def test_deep_nesting_ends_no_answer() -> None:
    for name in ("HERMES", "GEMMA4", "PYTHON", "LLAMA"):
        form: AnswerForm = getattr(recorded, name)
        assert form.calls is not None
        for text in (
            '{"name": "get_time", "arguments": ' + '{"a": [' * 5000,
            '{"function": ' * 3000,
            "call:get_time" + "{a:" * 5000,
            "[get_time(a=" + "[" * 5000 + "]" * 5000 + ")]",
            "[get_time(a=" + "-" * 5000 + "1)]",
            "[" + "a." * 500 + "get_time(a=1)]",
        ):
            scan(form, [form.calls.begins[0] + text])
            scan(form, [text])


def test_json_that_is_no_call_is_an_answer() -> None:
    text = '{"name": "get_weather", "age": 3}'
    assert fold(scan(LLAMA, list(text))).calls[0].name == "get_weather"
    text = '{"city": "Paris"}'
    assert fold(scan(LLAMA, list(text))) == Message(content=text)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'a\d\.b'", "a\\d\\.b"),
        (r'"\\d\n\x41\101\N{BULLET}\u0041"', "\\d\nAA\u2022A"),
        (r"'\400\777\18'", "\u0100\u01ff\x018"),
        (r"r'\d\n'", r"\d\n"),
        (r"u'\é' R'\('", r"\é\("),
        ("'it\\'s \\\n1if'", "it's 1if"),
        ("0x1f", 31),
    ],
)
def test_escapes_of_python_calls_that_python_warns_of(written: str, value: object) -> None:
    """Warnings are errors here: the parser would print them with the model's text."""
    message = fold(scan(PYTHON, [f"[get_time(x={written})]"]))
    assert [json.loads(call.arguments) for call in message.calls] == [{"x": value}]


@pytest.mark.parametrize("written", ["1if 1else 2", "[1for x in y]", "0x1or 2", "1.in z", r"b'\d'", r"f'\d{1}'"])
def test_what_is_no_literal_is_content_without_a_warning(written: str) -> None:
    text = f"[get_time(x={written})]"
    assert fold(scan(PYTHON, [text])) == Message(content=text)


@pytest.mark.parametrize("word", ["NaN", "-Infinity", "1e999", "[NaN]"])
def test_numbers_that_json_does_not_have_are_text(word: str) -> None:
    text = f"<tool_call><function=get_time><parameter=x>{word}</parameter></function></tool_call>"
    (call,) = fold(scan(XML, [text])).calls
    assert json.loads(call.arguments, parse_constant=pytest.fail) == {"x": word}
