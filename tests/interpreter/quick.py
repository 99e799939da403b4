"""Triton's interpreter without work whose results it has or drops.

While a kernel runs, it replaces the language's built-in functions by its own, and looks for all of them again at each
launch and at each call within a kernel. Here they are replaced once, by recorded steps (recipes.py), which all
programs of a grid take together (programs.py).
"""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from kernels.triton.arithmetic.sums import sum_of, sums_of_columns, sums_of_rows
from tests.interpreter import programs, recipes

#: Sums of many steps, and along which axis: NumPy takes the same steps at once.
SUMS = {sum_of.fn: 0, sums_of_rows.fn: 1, sums_of_columns.fn: 0}


def _sum_along(axis: int, numbers: Any) -> Any:
    handle = numbers.handle
    rows = np.moveaxis(handle.data, axis + handle.varies, 0)
    while (half := len(rows) // 2) > 0:
        rows = rows[:half] + rows[half:]
    return programs.tensor_of(rows[0], numbers.dtype, handle.varies)


class _Kernel:
    """Sees what kernels see."""

    __globals__ = {"tl": tl, "core": core}  # noqa: RUF012


def _call_within(self: Any, *arguments: Any, **options: Any) -> Any:
    if (axis := SUMS.get(self.fn)) is not None:
        return _sum_along(axis, *arguments)
    try:
        return self.rewrite()(*arguments, **options)
    except programs.PartingError:
        raise
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


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


_to_tensor = TritonSemantic.to_tensor


def _quick_to_tensor(self: Any, given: Any, check_type: bool = True) -> Any:
    return given if type(given) is core.tensor else _to_tensor(self, given, check_type)


def _init_handle(self: Any, data: Any, dtype: Any) -> None:
    self.data, self.dtype, self.attr = data, dtype, {}


def quicken() -> None:
    """Have the interpreter find once what stays the same, and run programs together."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "whether a sum or product overflows is computed, and only then looked at"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = programs.numpy_type
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    interpreter.TensorHandle.__init__ = _init_handle
    TritonSemantic.to_tensor = _quick_to_tensor
    for package in (core, tl, tl.math, core.tensor, core.tensor_descriptor_base):
        recipes.install(package)
    interpreter._patch_lang(_Kernel)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.InterpretedFunction.__call__ = _call_within
    programs.install()
