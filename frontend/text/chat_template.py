"""Chat templates: a list of messages to the prompt text a model was trained on.

A template is a Jinja program that comes with the model; it is run in Jinja's sandbox, with the conventions of
Hugging Face's apply_chat_template (trim_blocks, lstrip_blocks, tojson without HTML escapes, raise_exception,
strftime_now, break and continue, generation blocks). It sees plain JSON-like data only, never a caller's objects.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec

from frontend.text.template_sandbox import MAX_PROMPT_CHARS, TemplateSandbox, check_size
from ipc.errors import InvalidRequestError

_MAX_JSON_INDENT = 64  # columns

#: What a template's own expressions raise on messages they were not written for, besides Jinja's errors.
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
    bos_token: str | None = None,
    eos_token: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt for these messages; `kwargs` are further variables of the template (enable_thinking, documents, ...).

    Encode it with add_special_tokens=False: a template writes its special tokens itself. Text parts of a message are
    joined by newlines for a template that takes strings only. Errors: InvalidRequestError for messages of another
    form, a model without a template, and whatever the template itself refuses.
    """
    if template is None:
        raise InvalidRequestError("this model has no chat template; write the prompt yourself and call generate()")
    compiled, takes_parts = _compile(template)
    variables = _plain(kwargs | {"add_generation_prompt": add_generation_prompt}, "chat template arguments")
    variables.setdefault("documents", None)
    variables |= {
        "messages": _check_messages(messages, keep_parts=takes_parts),
        "tools": _plain(tools, "tools"),
    }
    # A token the model does not have stays undefined, which templates print as nothing; None would be printed.
    variables |= {
        name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
    }
    pieces: list[str] = []
    size = 0
    try:
        for piece in compiled.generate(variables):
            size += len(piece)
            if size > MAX_PROMPT_CHARS:
                raise InvalidRequestError(f"the rendered chat is longer than {MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
    except InvalidRequestError:
        raise
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(f"the chat template refused these messages: {_explain(error)}") from error
    return "".join(pieces)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it is its content."""

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
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """The template and whether it handles content given as a list of parts."""
    environment = _make_environment()
    try:
        tree = environment.parse(source)
        return environment.from_string(source), _takes_parts(tree)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidRequestError(f"the chat template is not valid Jinja{where}: {_explain(error)}") from error


def _takes_parts(tree: jinja2.nodes.Template) -> bool:
    """True when the template loops over a message's content, or over a variable called content."""
    for loop in tree.find_all(jinja2.nodes.For):
        looped: jinja2.nodes.Node | None = loop.iter
        while isinstance(looped, jinja2.nodes.Filter):
            looped = looped.node
        if _names_content(looped):
            return True
    return False


def _names_content(node: jinja2.nodes.Node | None) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"


def _check_messages(messages: object, *, keep_parts: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError(
            f'messages must be a list of {{"role": ..., "content": ...}} with at least one entry; got {messages!r:.80}'
        )
    return [_check_message(index, message, keep_parts) for index, message in enumerate(messages)]


def _check_message(index: int, message: object, keep_parts: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequestError(f'{where} must be a dict {{"role": ..., "content": ...}}; got {message!r:.80}')
    plain: dict[str, Any] = _plain(message, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f'{where}["role"] must be a str such as "user"; got {role!r:.80}')
    content = plain.get("content")
    if isinstance(content, str) or (content is None and plain.get("tool_calls")):
        return plain
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError(
            f'{where}["content"] must be a str or a list of {{"type": "text", "text": ...}}; got {content!r:.80}'
        )
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f'{where}["content"] has a part that is not {{"type": "text", "text": ...}}: {part!r:.80}; '
                "this version takes text only"
            )
    if not keep_parts:
        plain["content"] = "\n".join(part["text"] for part in content)
    return plain


def _plain(value: Any, where: str) -> Any:
    """A copy made of scalars, dicts, lists and tuples only: the sandbox cannot judge foreign objects."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_scalar)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} must be plain data (str, numbers, list, dict): {error}") from error


def _plain_scalar(value: object) -> object:
    """Subclasses of str, int and float (NumPy's float64 among them) lose what they add."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"got {type(value).__name__}")


def _explain(error: Exception) -> str:
    return str(error) or type(error).__name__
