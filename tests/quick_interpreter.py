"""Triton's interpreter without work whose results it has or drops: half of what small kernels take in tests.

It replaces the language's built-in functions by its own while a kernel runs, and looks for all of them again at each
launch and at each call within a kernel. What it replaces, and by what, stays the same here.
"""

import dataclasses
import inspect
from functools import cache
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def _builtins(package: Any) -> list[str]:
    """Return the names of a package's built-in functions. The first call must come before they are replaced."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if is_builtin(member):  # not replaced yet
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _patch_within(fn: Any) -> None:
    """Replace what a function within a kernel uses: what the launch does not replace stays replaced."""
    interpreter._patch_lang(fn)


def _call_within(self: Any, *arguments: Any, **options: Any) -> Any:
    _patch_within(self.fn)
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}  # by the name of a tensor's scalar type


def _known_np_dtype(kind: Any) -> Any:
    scalar = kind.scalar
    if (found := _np_dtypes.get(scalar.name)) is None:
        found = _np_dtypes[scalar.name] = _get_np_dtype(scalar)
    return found


def quicken() -> None:
    """Have the interpreter search once."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "whether a sum or product overflows is computed, and only then looked at"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _known_np_dtype
    interpreter._patch_builtin = _patch_builtin
    interpreter.InterpretedFunction.__call__ = _call_within
