"""Chat templates: turn a list of messages into the prompt text that a model was trained on.

A template is a Jinja program that comes with the model. It runs in Jinja's sandbox, with the conventions of Hugging
Face's apply_chat_template (trim_blocks, lstrip_blocks, tojson without HTML escapes, raise_exception, strftime_now,
break and continue, generation blocks). It gets only plain JSON-like data, never a caller's objects.
"""

import hashlib
import json
import re
import string
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from frontend.text.chat_messages import plain_data, read_messages
from frontend.text.template_sandbox import MAX_PROMPT_CHARS, TemplateSandbox, check_size
from ipc.errors import InvalidRequestError

_MAX_JSON_INDENT = 64  # columns
_MAX_ID_CHARS = 64  # length of a tool call's id, if a template requires one

#: Jinja's errors, and those that a template's expressions raise for unexpected messages.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


def render_chat(
    template: str | None,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    image_mark: str | None = None,
    **kwargs: Any,
) -> str:
    """Return the prompt for these messages. `kwargs` are further variables of the template (enable_thinking, documents,
    ...).

    Encode the prompt with add_special_tokens=False, because a template writes its special tokens itself.
    chat_messages.py states what messages may be. JSON text in the arguments of tool calls becomes mappings, which
    templates expect. Ids of tool calls get the length that the template requires. A template that fails with
    a mapping, because it puts the arguments into a text, gets the text. continue_final_message: end the prompt with the
    text of the last message, so that the output continues it; not together with add_generation_prompt. Errors:
    InvalidRequestError for messages of another form, for a model without a template, and for messages that the template
    refuses.
    """
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template (chat_template.jinja, or in tokenizer_config.json, chat_template.json or "
            "a GGUF file): give one with chat_template= or --chat-template FILE, or write the prompt yourself and call "
            "generate()"
        )
    if continue_final_message:
        messages, final = mark_final_text(messages, add_generation_prompt=add_generation_prompt)
    compiled = compile_template(template)
    variables = plain_data(kwargs | {"add_generation_prompt": add_generation_prompt}, "chat template arguments")
    variables.setdefault("documents", None)
    variables["tools"] = plain_data(tools, "tools")
    # A token that the model does not have stays undefined, which templates print as an empty text; None would be
    # printed.
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables |= {name: token for name, token in tokens.items() if token is not None}

    def render(arguments_as_text: bool) -> str:
        form: dict[str, Any] = {
            "keep_parts": compiled.takes_parts,
            "keep_none": compiled.tests_none,
            "keep_developer": compiled.names_developer,
            "image_mark": image_mark,
        }
        read = read_messages(messages, **form, arguments_as_text=arguments_as_text)
        if compiled.id_length is not None:
            fit_call_ids(read, compiled.id_length)
        return _render(compiled.template, variables | {"messages": read})

    prompt = _in_either_form(render)
    return cut_at_mark(prompt, final) if continue_final_message else prompt


def reads_pairs(template: str) -> bool:
    """Return whether a template is for messages of the roles "query" and "document". Errors: InvalidRequestError."""
    return compile_template(template).names_pairs


def check_template(template: str) -> None:
    """Check that this is a template. Errors: InvalidRequestError."""
    compile_template(template)


def _in_either_form(render: Callable[[bool], str]) -> str:
    """Return the prompt with arguments of tool calls as mappings, or as text if the template fails with those."""
    try:
        return render(False)
    except InvalidRequestError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        try:
            return render(True)
        except InvalidRequestError:
            raise error from error.__cause__


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_PROMPT_CHARS:
                raise InvalidRequestError(f"the rendered chat is longer than {MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
    except InvalidRequestError:
        raise
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(f"the chat template refused these messages: {_explain(error)}") from error
    return "".join(pieces)


class _Compiled(NamedTuple):
    template: jinja2.Template
    takes_parts: bool  # it loops over a message's content, or over a variable called content
    tests_none: bool  # it tests whether the content is none
    names_developer: bool  # it names the role "developer"
    names_pairs: bool  # it names the roles "query" and "document", of the two texts that a reranker compares
    id_length: int | None  # required length of a tool call's id


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's text for training. A prompt gets its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> TemplateSandbox:
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    check_size("tojson's indent", len(indent) if isinstance(indent, str) else indent or 0, _MAX_JSON_INDENT)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)
def compile_template(source: str) -> _Compiled:
    """Return the compiled template; the last 32 are kept. Errors: InvalidRequestError if it is not valid."""
    environment = _make_environment()
    try:
        tree = environment.parse(source)
        named = {one.value for one in tree.find_all(jinja2.nodes.Const) if isinstance(one.value, str)}
        return _Compiled(
            environment.from_string(source),
            takes_parts=_takes_parts(tree),
            tests_none=_tests_none(tree),
            names_developer="developer" in named,
            names_pairs=named >= {"query", "document"},
            id_length=_id_length(tree),
        )
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidRequestError(f"the chat template is not valid Jinja{where}: {_explain(error)}") from error


def _takes_parts(tree: jinja2.nodes.Template) -> bool:
    for loop in tree.find_all(jinja2.nodes.For):
        looped: jinja2.nodes.Node | None = loop.iter
        while isinstance(looped, jinja2.nodes.Filter):
            looped = looped.node
        if _names_content(looped):
            return True
    return False


def _tests_none(tree: jinja2.nodes.Template) -> bool:
    if any(test.name == "none" and _names_content(test.node) for test in tree.find_all(jinja2.nodes.Test)):
        return True
    return any(
        _names_content(comparison.expr) and any(_is_none(operand.expr) for operand in comparison.ops)
        for comparison in tree.find_all(jinja2.nodes.Compare)
    )


def _id_length(tree: jinja2.nodes.Template) -> int | None:
    """Return the length with which a template compares that of calls' ids, as in `tool_call.id|length != 9`."""
    for comparison in tree.find_all(jinja2.nodes.Compare):
        measured, bound = comparison.expr, comparison.ops[0].expr
        if not isinstance(measured, jinja2.nodes.Filter) or measured.name not in ("length", "count"):
            continue
        if not isinstance(bound, jinja2.nodes.Const) or type(bound.value) is not int:
            continue
        if _key_of(measured.node) in ("id", "tool_call_id") and 0 < bound.value <= _MAX_ID_CHARS:
            return bound.value
    return None


def _key_of(node: jinja2.nodes.Node | None) -> object:
    """Return the name of the attribute or item at the end of an expression."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr
    return (
        node.arg.value if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const) else None
    )


def _is_none(node: jinja2.nodes.Expr) -> bool:
    return isinstance(node, jinja2.nodes.Const) and node.value is None


def _names_content(node: jinja2.nodes.Node | None) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"


def _explain(error: Exception) -> str:
    return str(error) or type(error).__name__


# Ids of tool calls in a chat's history, for templates that require ids of a certain length (Mistral's: 9).
#
# A history may come from another server, whose ids have another form, or from an API whose calls have none (Ollama's).


_LETTERS = string.ascii_letters + string.digits
_Pending = list[tuple[object, str]]  # (function's name, id) of calls whose results have not arrived


def fit_call_ids(messages: list[dict[str, Any]], length: int) -> None:
    """Set the ids of calls and their results, in place, to `length` letters and digits.

    An id of this form is kept. Another is replaced by one that depends on it alone, so a call and its result keep the
    same id, and a chat's prompt is the same each time. A result without an id belongs to the first call without a
    result that has its name, otherwise to the first call without a result.
    """
    pending: _Pending = []
    for index, message in enumerate(messages):
        for at, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = _fitted(call.get("id") or f"{index}.{at}", length)
            function = call.get("function")
            pending.append((function.get("name") if isinstance(function, dict) else call.get("name"), call["id"]))
        if message.get("role") == "tool":
            given = message.get("tool_call_id")
            message["tool_call_id"] = _fitted(given, length) if given else _next(pending, message, length)
            pending = [one for one in pending if one[1] != message["tool_call_id"]]


def _next(pending: _Pending, message: dict[str, Any], length: int) -> str:
    name = message.get("tool_name") or message.get("name")
    named = [identity for function, identity in pending if function == name]
    return next(iter(named or [identity for _, identity in pending]), None) or _fitted("", length)


def _fitted(given: object, length: int) -> str:
    text = str(given)
    if re.fullmatch(rf"[A-Za-z0-9]{{{length}}}", text):
        return text
    number = int.from_bytes(hashlib.sha512(text.encode("utf-8", "surrogatepass")).digest())
    letters = []
    for _ in range(length):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)


# continue_final_message: a prompt that ends with the text of the last message, so that the output continues it.
#
# A chat template puts the end of a turn after each message. So a mark is added after the text of the last message, and
# the prompt is cut at the mark. This is the method of transformers 5.24: the template gets the text, so its processing
# (trimming, separating reasoning) is in the prompt.


_MARK = "\ue0f0\ue0f1continued here\ue0f1\ue0f0"  # from the private use area: no template or tokenizer contains it
_END = " "  # after the mark: a template that trims removes it


def mark_final_text(messages: Any, *, add_generation_prompt: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with the mark after the last one's text, and that text: for content parts, the last text.

    Errors: InvalidRequestError.
    """
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot be combined: a prompt continues the last "
            "message or begins a new one; set add_generation_prompt to False"
        )
    last = messages[-1] if isinstance(messages, (list, tuple)) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _MARK + _END}], content  # type: ignore[dict-item]
    parts = list(content) if isinstance(content, (list, tuple)) else []
    for at in reversed(range(len(parts))):
        text = parts[at].get("text") if isinstance(parts[at], dict) else parts[at]
        if isinstance(text, str):
            marked = text + _MARK + _END
            parts[at] = {**parts[at], "text": marked} if isinstance(parts[at], dict) else marked
            return [*messages[:-1], {**last, "content": parts}], text  # type: ignore[dict-item]
    raise InvalidRequestError(
        "continue_final_message needs a last message whose content is a str or has a part that is text; the last "
        f"message is {last!r:.80}"
    )


def cut_at_mark(prompt: str, text: str) -> str:
    """Return the prompt up to the mark, without the spaces before it if the template trims.

    Errors: InvalidRequestError for a template that does not show the whole text.
    """
    at = prompt.rfind(_MARK)
    if at < 0 or text.strip() not in prompt[:at]:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content unchanged: templates "
            "of reasoning models may leave reasoning out"
        )
    trims = not prompt.startswith(_END, at + len(_MARK))
    return prompt[:at].rstrip() if trims else prompt[:at]
