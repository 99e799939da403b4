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

import numpy as np
from triton.language import core
from triton.language.core import is_builtin
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from kernels.triton.arithmetic.sums import sum_of, sums_of_columns, sums_of_rows


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


#: Sums of many steps, and along which axis: NumPy takes the same steps at once.
SUMS = {sum_of.fn: 0, sums_of_rows.fn: 1, sums_of_columns.fn: 0}


def _sum_along(axis: int, numbers: Any) -> Any:
    rows = np.moveaxis(numbers.handle.data, axis, 0)
    while (half := len(rows) // 2) > 0:
        rows = rows[:half] + rows[half:]
    return interpreter.ReduceOps(axis, None, False).to_tensor(rows[0], numbers.dtype)


def _call_within(self: Any, *arguments: Any, **options: Any) -> Any:
    if (axis := SUMS.get(self.fn)) is not None:
        return _sum_along(axis, *arguments)
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


#: Types of two operands whose result has that type, whatever the operation.
_PLAIN = frozenset({"fp32", "fp64", "int32", "int64"})
_operands = TritonSemantic.binary_op_type_checking_impl
_constants: dict[Any, Any] = {}


def _quick_operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
    """What numbers become next to a block stays the same: nothing writes into a block."""
    left, right = type(lhs), type(rhs)
    if left is core.tensor and lhs.dtype.name in _PLAIN:
        shape = getattr(lhs.type, "quick_shape", None)
        if right is core.tensor:
            if rhs.dtype is lhs.dtype and getattr(rhs.type, "quick_shape", None) is shape:
                return lhs, rhs
        elif right is float or right is int:
            key = right, float(rhs).hex() if right is float else rhs, lhs.dtype, shape
            if (found := _constants.get(key)) is None:
                same, found = _operands(self, lhs, rhs, *options, **named)
                if same is not lhs:
                    return same, found
                _constants[key] = found
            return lhs, found
    return _operands(self, lhs, rhs, *options, **named)


_unwrap = core._unwrap_if_constexpr
_UNWRAPPED = frozenset({core.tensor, int, float, bool, str, type(None), core.dtype})


def _quick_unwrap(given: Any) -> Any:
    kind = type(given)
    if kind is core.constexpr:
        return given.value
    return given if kind in _UNWRAPPED else _unwrap(given)


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
    TritonSemantic.binary_op_type_checking_impl = _quick_operands
    core._unwrap_if_constexpr = _quick_unwrap
    TritonSemantic.computation_type_impl = cache(TritonSemantic.computation_type_impl)
