"""The format of a model's answers, found from its chat template and special tokens unless the operator names it."""

from collections.abc import Collection

from frontend.calls.formats import (
    CALL_FORMATS,
    HARMONY,
    HARMONY_NAMES,
    HERMES,
    REASONING_FORMATS,
    AnswerForm,
    CallFormat,
)
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError

NONE = "none"
#: Text in a model's template, or one of its tokens -> the format; the first match counts.
_CALL_SIGNS = (
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
)
_REASONING_SIGNS = (("</think>", "qwen3"), ("[/THINK]", "mistral"), ("<|channel>thought", "gemma4"))
_HARMONY_SIGN = "<|channel|>"


def choose_form(tokenizer: Tokenizer | None, calls: str | None = None, reasoning: str | None = None) -> AnswerForm:
    """Return how the model writes answers.

    calls, reasoning: names of vLLM's --tool-call-parser and --reasoning-parser; "none"; None = from the model. A model
    whose template has no known marks gets Hermes' form. Errors: ConfigError for an unknown name.
    """
    templates = [] if tokenizer is None else list(tokenizer.chat_templates.values())
    if calls in HARMONY_NAMES or reasoning in HARMONY_NAMES or (not calls and _find(templates, _HARMONY_SIGN)):
        return AnswerForm(is_harmony=True)
    if reasoning is None:
        found = next((name for sign, name in _REASONING_SIGNS if _find(templates, sign)), None)
    else:
        found = _check("reasoning-parser", reasoning, REASONING_FORMATS)
    marks = None if found is None else REASONING_FORMATS[found]
    return AnswerForm(_choose_calls(tokenizer, templates, calls), marks)


def has_special_marks(form: AnswerForm, special_tokens: Collection[str]) -> bool:
    """Return whether one of the form's marks is a special token, which is usually not part of the text."""
    if form.is_harmony:
        return True
    calls = (*form.calls.begins, form.calls.end) if form.calls else ()
    return any(token in mark for mark in (*calls, *(form.reasoning or ())) for token in special_tokens)


def shows_tools(template: str | None) -> bool:
    """Return whether a chat template handles tools."""
    return template is not None and "tools" in template


def _choose_calls(tokenizer: Tokenizer | None, templates: list[str], given: str | None) -> CallFormat | None:
    if given is not None:
        name = _check("tool-call-parser", given, CALL_FORMATS)
        return None if name is None else CALL_FORMATS[name]
    if tokenizer is None:
        return None
    for sign, name in _CALL_SIGNS:
        if _find(templates, sign):
            return CALL_FORMATS[name]
    if any(map(shows_tools, templates)):  # a template that does not show the answer's form
        for sign, name in _CALL_SIGNS:
            if tokenizer.hf.token_to_id(sign) is not None:
                return CALL_FORMATS[name]
    return HERMES


def _find(templates: list[str], sign: str) -> bool:
    return any(sign in template for template in templates)


def _check(option: str, name: str, known: Collection[str]) -> str | None:
    if name == NONE:
        return None
    if name not in known:
        names = ", ".join(sorted({*known, HARMONY, NONE}))
        raise ConfigError(f"--{option} {name!r:.80} is not known; known: {names}")
    return name
