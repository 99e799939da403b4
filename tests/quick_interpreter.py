"""Triton's interpreter without work whose results it has or drops: three quarters of what small kernels take in tests.

It replaces the language's built-in functions by its own while a kernel runs, and looks for all of them again at each
launch and at each call within a kernel. What it replaces, and by what, stays the same here. The types of two operands
and of each result are found as before, but once for each pair and shape.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from triton.language import core
from triton.language.core import is_builtin
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def _builtins(package: Any) -> list[str]:
    """Return the names of a package's built-in functions. The first call must come before they are replaced."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


@cache
def _interpreted(member: Any) -> Callable[..., Any]:
    """Return what stands for a built-in function while a kernel runs."""
    called, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return called(*arguments, **options)

    return call


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if is_builtin(member):  # not replaced yet
            scope.set_attr(package, name, _interpreted(member))


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


class _Shape:
    """What all blocks of one shape have in common: their numbers of elements and what types and tensors hold."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.name = str(sizes)
        self.of_type = core.tuple(sizes)
        self.of_type.quick_shape = self
        self.num_elements = core.validate_block_shape(self.of_type)
        self.numel = core.constexpr(self.num_elements)
        self.of_tensor = core.tuple([core.constexpr(size) for size in sizes])


_shape = cache(_Shape)
_SCALAR = core.tuple([])
_ONE = core.constexpr(1)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    if type(shape) is core.tuple and "quick_shape" in shape.__dict__:  # another type's
        found = shape.quick_shape
    else:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        found = _shape(sizes)
    self.element_ty, self.quick_shape = element_ty, found
    self.shape, self.numel = found.of_type, found.num_elements
    self.name = f"<{found.name}, {element_ty.name}>"


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    if kind.is_block():
        self.shape, self.numel = kind.quick_shape.of_tensor, kind.quick_shape.numel
    else:
        self.shape, self.numel = _SCALAR, _ONE


_broadcast = TritonSemantic.broadcast_impl_value


def _quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    if getattr(lhs.type, "quick_shape", None) is getattr(rhs.type, "quick_shape", None):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def quicken() -> None:
    """Have the interpreter search once."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "whether a sum or product overflows is computed, and only then looked at"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _known_np_dtype
    interpreter._patch_builtin = _patch_builtin
    interpreter.InterpretedFunction.__call__ = _call_within
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    TritonSemantic.broadcast_impl_value = _quick_broadcast
    TritonSemantic.computation_type_impl = cache(TritonSemantic.computation_type_impl)
