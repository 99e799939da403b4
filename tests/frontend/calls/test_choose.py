"""The form of a model's answers, by its chat template, and by the names that its owner gives."""

import pytest
import tokenizers
from tokenizers import models

from frontend.calls.choose import choose_form, has_special_marks, shows_tools
from frontend.text.tokenizer import Tokenizer
from ipc.errors import ConfigError


def model(template: str, *tokens: str) -> Tokenizer:
    hf = tokenizers.Tokenizer(models.BPE())
    hf.add_special_tokens(list(tokens))
    return Tokenizer(hf, chat_templates={"default": template})


@pytest.mark.parametrize(
    ("template", "tokens", "calls", "reasoning"),
    [
        ("{{ tools }}<tool_call>", (), "hermes", None),
        ("{{ tools }}<tool_call>{% if '</think>' in content %}", (), "hermes", "</think>"),
        ("{{ tools }}<tool_call><function=", (), "qwen3_coder", None),
        ('{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]', ("[TOOL_CALLS]",), "mistral", None),
        ("{{ tools }}Environment: ipython <|python_tag|>", (), "llama3_json", None),
        ("{{ tools }}Environment: ipython", ("<|python_tag|>",), "llama3_json", None),
        ("{{ messages }}", ("<|python_tag|>",), "hermes", None),  # it shows no tools: they are shown in Hermes' form
        ("{{ tools }}<start_function_call>", (), "functiongemma", None),
        ("{{ tools }}<|tool_call><|channel>thought", (), "gemma4", "<channel|>"),
    ],
)  # fmt: skip
def test_the_template_tells_the_form(template: str, tokens: tuple[str, ...], calls: str, reasoning: str | None) -> None:
    form = choose_form(model(template, *tokens))
    assert form.calls is not None
    assert form.calls.name == calls
    assert (form.reasoning[1] if form.reasoning else None) == reasoning


def test_harmony_is_known_by_its_channels() -> None:
    assert choose_form(model("<|start|>system<|message|>...<|channel|>final")).is_harmony
    assert choose_form(None, "openai").is_harmony


def test_the_owners_names_count() -> None:
    qwen = model("{{ tools }}<tool_call></think>")
    form = choose_form(qwen, "mistral", "none")
    assert form.calls is not None
    assert (form.calls.name, form.reasoning) == ("mistral", None)
    assert choose_form(qwen, "none").calls is None
    for name in ({"calls": "hermess"}, {"reasoning": "qwen9"}):
        with pytest.raises(ConfigError, match=r"is not known; known: .*(hermes|qwen3)"):
            choose_form(qwen, **name)


def test_special_marks_are_found() -> None:
    mistral = choose_form(None, "mistral")
    assert has_special_marks(mistral, {"[TOOL_CALLS]": 5})
    assert not has_special_marks(mistral, {"</s>": 2})
    assert shows_tools("{% if tools %}")
    assert not shows_tools("{{ messages }}")
    assert not shows_tools(None)
