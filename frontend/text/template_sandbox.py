"""TemplateSandbox: Jinja's sandbox with a bound on the size of each expression's result.

Jinja's own sandbox limits range() and attribute access. It does not stop "x" * 10**12, "%0999999999d" % 1 or a filter
that pads to a billion columns. Here, sizes are computed before the work is done. A template can still loop.
"""

import re
import string
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox

#: Longest rendered prompt, and longest result of one expression, characters.
MAX_PROMPT_CHARS = 16 << 20
_MAX_POWER_BITS = 4096

_SIZED = (str, list, tuple)
#: One conversion of a %-format in the supported form; other forms are refused.
_CONVERSION = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\d*)(?:\.(\d*))?[a-zA-Z%]")
_WIDTH_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Jinja's code generator, with `a ~ b` compiled to a call of the environment's concatenate()."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment in which templates run. Oversized results raise TemplateRuntimeError."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))
    code_generator_class = _CodeGenerator

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {"center": _center, "format": _format, "indent": _indent, "join": _join, "replace": _replace}

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result, then apply the operator."""
        if operator == "**":
            size = left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
            check_size("**", size, _MAX_POWER_BITS)
        elif operator == "*":
            text, count = (right, left) if isinstance(left, int) else (left, right)
            check_size("*", len(text) * count if isinstance(text, _SIZED) and isinstance(count, int) else 0)
        elif operator == "+":
            check_size("+", len(left) + len(right) if isinstance(left, _SIZED) and isinstance(right, _SIZED) else 0)
        elif isinstance(left, str):
            check_size("%", _percent_size(left, right))
        return super().call_binop(context, operator, left, right)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """Return the texts of the parts joined, after a check of their size."""
        texts = [str(part) for part in parts]
        check_size("~", sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; check the size of the result first if it is a method of str."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            check_size(name, _method_size(text, name, args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)


def check_size(operation: str, size: int, limit: int = MAX_PROMPT_CHARS) -> None:
    """Raise TemplateRuntimeError when size exceeds the limit; render_chat turns it into an InvalidRequestError."""
    if size > limit:
        raise jinja2.TemplateRuntimeError(
            f"the result of {operation} would have size {size}; in a template at most {limit} is allowed"
        )


def _method_size(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return an upper bound of the length of this str method's result; 0 for methods that do not make texts longer."""
    first = args[0] if args else kwargs.get("tabsize", 8)
    if name in _WIDTH_METHODS and isinstance(first, int):
        return first
    if name == "expandtabs" and isinstance(first, int):
        return len(text) + text.count("\t") * first
    if name == "join" and isinstance(first, (list, tuple)):
        return _joined_size(text, first)
    if name == "replace" and len(args) > 1:
        return _replaced_size(text, *args[:2])
    return _brace_size(text, args, kwargs) if name in ("format", "format_map") else 0


def _percent_size(form: str, values: Any) -> int:
    conversions = _CONVERSION.findall(form)
    if "%" in _CONVERSION.sub("", form):
        raise jinja2.TemplateRuntimeError(f"{form!r:.80} is not a %-format that templates may use (* and nested names)")
    widths = sum(_number(width) + _number(precision) for width, precision in conversions)
    return len(form) + widths + len(conversions) * _longest(values)


def _brace_size(form: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    fields = [spec or "" for _, name, spec, _ in string.Formatter().parse(form) if name is not None]
    if any("{" in spec for spec in fields):
        raise jinja2.TemplateRuntimeError(
            f"{form!r:.80} takes a width from its arguments; in a template it must be a literal"
        )
    widths = sum(_number(digits) for spec in fields for digits in re.findall(r"\d+", spec))
    return len(form) + widths + len(fields) * _longest([*args, *kwargs.values()])


def _number(digits: str) -> int:
    return int(digits[:12] or 0)  # 12 digits already exceed every limit; int() of thousands of digits raises


def _longest(values: Any) -> int:
    """Return the length of the longest text in the arguments of a format."""
    if isinstance(values, str):
        return len(values)
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return max((_longest(value) for value in inner), default=0)


def _joined_size(separator: str, parts: Iterable[Any]) -> int:
    return sum(len(part) + len(separator) for part in parts if isinstance(part, str))


def _replaced_size(text: str, old: Any, new: Any) -> int:
    count = text.count(old) if isinstance(old, str) else 0
    return len(text) + count * len(new) if isinstance(new, str) else 0


def _center(value: str, width: int = 80) -> str:
    check_size("center", width)
    return jinja2.filters.do_center(value, width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    check_size("format", _percent_size(str(value), kwargs or args))
    return jinja2.filters.do_format(value, *args, **kwargs)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    columns = width if isinstance(width, int) else len(width)
    check_size("indent", len(s) + (s.count("\n") + 1) * columns)
    return jinja2.filters.do_indent(s, width, first, blank)


@jinja2.pass_eval_context
def _join(
    eval_ctx: jinja2.nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    get = jinja2.filters.make_attrgetter(eval_ctx.environment, attribute)
    parts = [part if attribute is None else get(part) for part in value]
    check_size("join", _joined_size(str(d), parts))
    return jinja2.filters.sync_do_join(eval_ctx, parts, d)


@jinja2.pass_eval_context
def _replace(eval_ctx: jinja2.nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    check_size("replace", _replaced_size(str(s), old, new))
    return jinja2.filters.do_replace(eval_ctx, s, old, new, count)
