"""The programs of a grid at once in Triton's interpreter.

The numbers of all programs are one array, whose first axis they are, so a step of Python is taken once for all of
them. Numbers that are the same for all have no such axis. If programs take different ways, what they have stored is
taken back, and those that take the same way begin again together.
"""

import ctypes
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.interpreter.compiled import address, compiled
from tests.interpreter.recipes import Recorder

_MEMORY = Path(__file__).with_name("memory.c")

#: Programs at once: more would leave the CPU's cache.
MOST = 16
#: How often programs that run together may part; after that each runs alone.
_PARTINGS = 3

Array = npt.NDArray[Any]
TensorHandle.varies = False  # whether the first axis of the data are programs


class PartingError(Exception):
    """Programs take different ways. numbers: what decides, by program."""

    def __init__(self, numbers: Array | None = None) -> None:
        super().__init__("programs take different ways")
        self.numbers = numbers


@cache
def _numpy_type(name: str) -> np.dtype[Any]:
    """Of a scalar type; floats that NumPy lacks are the integers of their bits."""
    if name.startswith(("pointer", "const_pointer")):
        return np.dtype(np.uint64)
    kinds = {"int1": "bool", "bf16": "uint16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    return np.dtype("uint8" if name.startswith("fp8") else kinds.get(name, name))


def numpy_type(kind: Any) -> np.dtype[Any]:
    """Return what the interpreter keeps numbers of a type in."""
    return _numpy_type(kind.scalar.name)


def _fitting(output: Array, kind: Any) -> Array:
    """Of an operation whose result NumPy gave a larger type."""
    small = numpy_type(kind)
    return output.astype(small) if output.dtype.itemsize > small.itemsize else output


def made(data: Array, dtype: Any, varies: bool) -> TensorHandle:
    handle = TensorHandle(data, dtype)
    if varies:
        handle.varies = True
    return handle


def aligned(*handles: TensorHandle) -> tuple[list[Array], bool]:
    """Return the data of some handles so that NumPy's rules fit, and whether any varies."""
    varies = False
    for handle in handles:
        varies = varies or handle.varies
    if not varies:
        return [handle.data for handle in handles], False
    rank = max(handle.data.ndim - handle.varies for handle in handles)
    return [_with_rank(handle, rank) for handle in handles], True


def _with_rank(handle: TensorHandle, rank: int) -> Array:
    data: Array = handle.data
    if not handle.varies or data.ndim == rank + 1:
        return data
    return data.reshape(len(data), *(1,) * (rank + 1 - data.ndim), *data.shape[1:])


def elementwise(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Of a builder's method that works on one element after the other."""

    def call(self: Any, *given: Any) -> TensorHandle:
        handles = [each for each in given if isinstance(each, TensorHandle)]
        arrays, varies = aligned(*handles)
        if not varies:
            return method(self, *given)
        own = iter([TensorHandle(data, handle.dtype) for data, handle in zip(arrays, handles, strict=True)])
        result = method(self, *(next(own) if isinstance(each, TensorHandle) else each for each in given))
        result.varies = True
        return result

    return call


def _single(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of a method of the builder that knows one program only."""

    def call(self: Any, *given: Any, **options: Any) -> Any:
        for each in (*given, *options.values()):
            if isinstance(each, TensorHandle) and each.varies:
                raise PartingError
        return method(self, *given, **options)

    return call


def _binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Array]) -> TensorHandle:
    """The interpreter's, without a look at sizes that fit."""
    if lhs.varies or rhs.varies:
        (left, right), varies = aligned(lhs, rhs)
    else:
        left, right, varies = lhs.data, rhs.data, False
    kind = lhs.dtype.scalar
    if left.dtype == np.bool_ and right.dtype == np.bool_:
        output = (op(left.astype(np.int8), right.astype(np.int8)) & 1).astype(np.bool_)
    else:
        output = op(left, right)
    return made(_fitting(output, kind), kind, varies)


def _ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Callable[..., Array]) -> TensorHandle:
    arrays, varies = aligned(lhs, rhs, other)
    kind, output = other.dtype.scalar, op(*arrays)
    return made(_fitting(output, kind), kind, varies)


class Overwritten(list[tuple[Array, Array, Array | None]]):
    """Pointers, the numbers before, and whether each was stored; in the order of the stores."""


class Programs:
    """Those that run: their places in the grid [3, N], and what they have overwritten."""

    places: npt.NDArray[np.int32] = np.zeros((3, 1), np.int32)
    overwritten: Overwritten | None = None

    def run(self, fn: Callable[..., None], arguments: dict[str, Any], places: Any, partings: int = 0) -> None:
        self.places, count = places, places.shape[1]
        self.overwritten = Overwritten() if count > 1 else None
        try:
            fn(**arguments)
            return
        except PartingError as parting:
            assert self.overwritten is not None
            for pointers, before, mask in reversed(self.overwritten):
                _move("store", pointers, mask, before)
            numbers = parting.numbers
        if numbers is None or partings == _PARTINGS:
            numbers = np.arange(count)
        found, first = np.unique(numbers, return_index=True)
        for number in found[np.argsort(first)]:
            self.run(fn, arguments, places[:, numbers == number], partings + 1)


_PROGRAMS = Programs()


def _create_get_program_id(self: Any, axis: int) -> TensorHandle:
    numbers = _PROGRAMS.places[axis]
    if (numbers == numbers[0]).all():
        return TensorHandle(numbers[:1], tl.int32)
    return made(numbers[:, None], tl.int32, True)


def _create_addptr(self: Any, ptr: TensorHandle, offset: TensorHandle) -> TensorHandle:
    (pointers, steps), varies = aligned(ptr, offset)
    size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
    return made(pointers + steps.astype(np.uint64) * np.uint64(size), ptr.dtype, varies)


def _create_splat(self: Any, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
    shape = tuple(ret_ty.shape)
    if not arg.varies:
        return TensorHandle(np.full(shape, arg.data, dtype=arg.data.dtype), arg.dtype.scalar)
    count = len(arg.data)
    data = np.broadcast_to(arg.data.reshape(count, *(1,) * len(shape)), (count, *shape))
    return made(data, arg.dtype.scalar, True)


def _create_broadcast(self: Any, arg: TensorHandle, shape: Any) -> TensorHandle:
    shape = (len(arg.data), *shape) if arg.varies else tuple(shape)
    return made(np.broadcast_to(arg.data, shape), arg.dtype.scalar, arg.varies)


def _create_expand_dims(self: Any, arg: TensorHandle, axis: int) -> TensorHandle:
    axis += arg.varies
    shape = arg.data.shape
    return made(arg.data.reshape(*shape[:axis], 1, *shape[axis:]), arg.dtype.scalar, arg.varies)


def _create_reshape(self: Any, arg: TensorHandle, shape: Any, allow_reorder: bool) -> TensorHandle:
    shape = (len(arg.data), *shape) if arg.varies else tuple(shape)
    return made(arg.data.reshape(shape), arg.dtype.scalar, arg.varies)


def _create_trans(self: Any, arg: TensorHandle, perm: Any) -> TensorHandle:
    perm = (0, *(axis + 1 for axis in perm)) if arg.varies else perm
    return made(np.transpose(arg.data, perm), arg.dtype.scalar, arg.varies)


def _create_join(self: Any, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    arrays, varies = aligned(lhs, rhs)
    return made(np.stack(np.broadcast_arrays(*arrays), axis=-1), lhs.dtype.scalar, varies)


def _create_split(self: Any, val: TensorHandle) -> tuple[TensorHandle, TensorHandle]:
    first, second = (made(val.data[..., place], val.dtype.scalar, val.varies) for place in (0, 1))
    return first, second


def _create_gather(self: Any, src: TensorHandle, indices: TensorHandle, axis: int) -> TensorHandle:
    (source, places), varies = aligned(src, indices)
    if varies and not (src.varies and indices.varies):
        count = len(source if src.varies else places)
        source, places = (
            data if handle.varies else np.broadcast_to(data, (count, *data.shape))
            for data, handle in ((source, src), (places, indices))
        )
    return made(np.take_along_axis(source, places, axis=axis + varies), src.dtype.scalar, varies)


def _move(name: str, pointers: Array, mask: Array | None, numbers: Array) -> None:
    """Load numbers from pointers, or store them there; see memory.c. All are contiguous and of one shape."""
    where = None if mask is None else address(mask)
    count, size = ctypes.c_size_t(numbers.size), ctypes.c_size_t(numbers.itemsize)
    getattr(compiled(_MEMORY), name)(address(pointers), where, address(numbers), count, size)


def _same_shape(*handles: TensorHandle | None) -> tuple[list[Any], bool]:
    """Return contiguous data of some handles, of the same shape."""
    arrays, varies = aligned(*(each for each in handles if each is not None))
    shape = arrays[0].shape
    if any(data.shape != shape for data in arrays):
        shape = np.broadcast_shapes(*(data.shape for data in arrays))
        arrays = [np.broadcast_to(data, shape) for data in arrays]
    found = iter(arrays)
    return [None if each is None else np.ascontiguousarray(next(found)) for each in handles], varies


def _create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, policy: Any, is_volatile: bool) -> TensorHandle:
    kind = ptrs.get_element_ty()
    (pointers, chosen, given), varies = _same_shape(ptrs, mask, other)
    numbers = np.zeros(pointers.shape, numpy_type(kind)) if given is None else given.astype(numpy_type(kind))
    _move("load", pointers, chosen, numbers)
    return made(numbers, kind, varies)


def _create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, policy: Any) -> None:
    (pointers, numbers, chosen), _ = _same_shape(ptrs, value, mask)
    assert numbers.dtype == numpy_type(ptrs.get_element_ty())
    if _PROGRAMS.overwritten is not None:
        before = np.zeros_like(numbers)
        _move("load", pointers, chosen, before)
        _PROGRAMS.overwritten.append((pointers, before, chosen))
    _move("store", pointers, chosen, numbers)


def _create_load(self: Any, ptr: TensorHandle, policy: Any, is_volatile: bool) -> TensorHandle:
    return _create_masked_load(self, ptr, None, None, policy, is_volatile)


def _create_store(self: Any, ptr: TensorHandle, val: TensorHandle, policy: Any) -> None:
    _create_masked_store(self, ptr, val, None, policy)


def _number(self: Any) -> Any:
    """Of a scalar that is the same for all programs."""
    data = self.handle.data
    if data.size == 1:
        return data.item()
    numbers = data.reshape(-1)
    if (numbers == numbers[0]).all():
        return numbers[0].item()
    raise PartingError(numbers)


def _index(self: Any) -> int:
    return int(_number(self))


def _bool(self: Any) -> bool:
    if Recorder.current is not None or self.type.is_block():
        return True  # as any object: the language looks whether there is one
    return bool(_number(self))


def _transposed(self: Any) -> Any:
    handle, shape = self.handle, list(self.type.shape)
    shape[-1], shape[-2] = shape[-2], shape[-1]
    data = np.swapaxes(handle.data, -1, -2)
    return core.tensor(made(data, handle.dtype, handle.varies), core.block_type(self.dtype, shape))


def tensor_of(data: Array, dtype: Any, varies: bool) -> Any:
    """Of numbers of some blocks, or of some scalars."""
    data = np.asarray(data).astype(numpy_type(dtype), copy=False)
    shape = data.shape[varies:]
    kind = core.block_type(dtype, list(shape)) if shape else dtype
    return core.tensor(made(data if shape else data.reshape(*data.shape, 1), dtype, varies), kind)


#: Of numbers along an axis, by the name of the language's function; what is not a number is left out, as on a GPU.
_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "_sum_combine": np.sum,
    "_elementwise_max": np.fmax.reduce,
    "_elementwise_min": np.fmin.reduce,
}
_PLACES: dict[str, Callable[..., Array]] = {
    "_argmax_combine_tie_break_left": np.nanargmax,
    "_argmin_combine_tie_break_left": np.nanargmin,
}
_BEST = {np.nanargmax: np.fmax.reduce, np.nanargmin: np.fmin.reduce}


def _not_recorded() -> None:
    if Recorder.current is not None:
        Recorder.current.is_complete = False


def _reduce(given: Any, axis: int | None, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    _not_recorded()
    first = given[0] if isinstance(given, tuple) else given
    data, varies = first.handle.data, first.handle.varies
    if axis is None:
        data, axis = data.reshape(len(data), -1) if varies else data.reshape(-1), 0
        assert not keep_dims
    elif keep_dims:
        shape = [*data.shape[: axis + varies], 1, *data.shape[axis + varies + 1 :]]
    if (places := _PLACES.get(combine_fn.__name__)) is not None:
        best, place = _BEST[places](data, axis=axis + varies), places(data, axis=axis + varies)
        results = [(best, first.dtype), (place, tl.int32)]
    elif (reduction := _REDUCTIONS.get(combine_fn.__name__)) is not None:
        results = [(reduction(data, axis=axis + varies), first.dtype)]
    else:
        _need_one(given)
        return interpreter.ReduceOps(axis, combine_fn, keep_dims).apply(given)
    found = tuple(tensor_of(each.reshape(shape) if keep_dims else each, kind, varies) for each, kind in results)
    return found if isinstance(given, tuple) else found[0]


def _scan(given: Any, axis: int, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    _not_recorded()
    if combine_fn.__name__ == "_sum_combine" and not reverse:
        handle = given.handle
        return tensor_of(np.cumsum(handle.data, axis=axis + handle.varies), given.dtype, handle.varies)
    _need_one(given)
    return interpreter.ScanOps(axis, combine_fn, reverse).apply(given)


def _need_one(given: Any) -> None:
    if any(each.handle.varies for each in (given if isinstance(given, tuple) else (given,))):
        raise PartingError


@cache
def _parameters(fn: Any) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """Names, defaults and those of constants."""
    given = inspect.signature(fn).parameters
    defaults = {name: each.default for name, each in given.items() if each.default is not each.empty}
    types = inspect.get_annotations(fn)  # classes, or their names
    return tuple(given), defaults, frozenset(name for name, kind in types.items() if "constexpr" in str(kind))


def _launch(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Run a kernel over a grid; tensors are in the CPU's memory."""
    if warmup:
        return
    fn = self.rewrite()
    names, defaults, constants = _parameters(fn)
    arguments = defaults | dict(zip(names, given, strict=False))
    arguments |= {name: value for name, value in options.items() if name in names}
    if missing := [name for name in names if name not in arguments]:
        raise TypeError(f"{fn.__name__}() lacks {missing}")
    implicit = interpreter._implicit_cvt
    arguments = {name: value if name in constants else implicit(value) for name, value in arguments.items()}
    sizes = tuple(grid(arguments) if callable(grid) else grid)
    sizes += (1,) * (3 - len(sizes))
    interpreter.interpreter_builder.set_grid_dim(*sizes)
    places = np.indices(sizes, np.int32).reshape(3, -1)
    try:
        for first in range(0, places.shape[1], MOST):
            _PROGRAMS.run(fn, arguments, places[:, first : first + MOST])
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_SINGLE = "cat", "histogram", "dot_scaled", "atomic_cas", "atomic_rmw", "atomic_load", "atomic_store", "atomic_poll"
_SINGLE += "print", "assert", "make_tensor_descriptor", "unsplat"
_ELEMENTWISE = "idiv", "ashr", "umulhi", "fabs", "erf", "rsqrt", "fma", "fp_to_fp", "bitcast"


def install() -> None:
    """Have the interpreter run programs together. Forks share the C program."""
    compiled(_MEMORY)
    builder: Any = InterpreterBuilder
    builder.binary_op, builder.ternary_op = _binary_op, _ternary_op
    for name in _ELEMENTWISE:
        setattr(builder, f"create_{name}", elementwise(getattr(builder, f"create_{name}")))
    builder.unary_op, builder.cast_impl = elementwise(builder.unary_op), elementwise(builder.cast_impl)
    for name in ("int_to_ptr", "ptr_to_int"):
        setattr(builder, f"create_{name}", builder.create_bitcast)
    builder.create_addptr = _create_addptr
    for name in _SINGLE:
        setattr(builder, f"create_{name}", _single(getattr(builder, f"create_{name}")))
    for method in _METHODS:
        setattr(builder, method.__name__.removeprefix("_"), method)
    tensor: Any = core.tensor
    tensor.__index__, tensor.__bool__, tensor.T = _index, _bool, property(_transposed)
    for package in (tl, core):
        package.reduce, package.associative_scan = _reduce, _scan  # type: ignore[attr-defined,assignment]
    interpreter.InterpretedFunction.run = _launch  # type: ignore[method-assign]


_METHODS: tuple[Callable[..., Any], ...] = (
    _create_get_program_id,
    _create_splat,
    _create_broadcast,
    _create_expand_dims,
    _create_reshape,
    _create_trans,
    _create_join,
    _create_split,
    _create_gather,
    _create_masked_load,
    _create_masked_store,
    _create_load,
    _create_store,
)
