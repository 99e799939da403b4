"""Built-in functions of Triton's language as recipes of the interpreter.

A call of one finds the types that its operands become, and the interpreter's steps for them. Both follow from the
operands' types and shapes and from constants alone, as in the compiler, which knows no numbers. So the steps of the
first call with such operands are recorded, and those of later calls are the same steps with other numbers.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from triton.language import core
from triton.language.core import is_builtin
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_PREFIXES = ("create_f", "create_icmp", "create_min", "create_max", "create_s", "create_u")
#: Steps that work on one element after the other, most of them on two operands, which NumPy enlarges by itself.
_ELEMENTWISE = {
    *(name for name in vars(interpreter.InterpreterBuilder) if name.startswith(_PREFIXES)),
    *(f"create_{name}" for name in ("add", "mul", "and", "or", "xor", "lshr", "ashr", "idiv", "addptr")),
} - {f"create_{name}" for name in ("fma", "store", "splat", "split", "unsplat", "fp_to_fp")}
#: Steps that enlarge an operand, and which that is.
_ENLARGING = {"create_splat": 1, "create_broadcast": 0}
#: Steps whose results follow from more than their operands.
_OF_PROGRAMS = {"create_get_program_id", "create_get_num_programs"}


class UnknownError(Exception):
    """Of what a call was given, it is not known what steps depend on."""


def _part(given: Any, handles: list[TensorHandle]) -> Any:
    """Return what a call's steps depend on of an argument; append the handles of its tensors."""
    kind = type(given)
    if kind is core.tensor:
        handles.append(given.handle)
        return given.type.name
    if given is None or kind is int:
        return given
    if kind is core.constexpr:
        return kind, _part(given.value, handles)
    if kind is float:
        return kind, given.hex()
    if kind is bool or kind is str:
        return kind, given
    if kind is tuple or kind is list or kind is core.tuple:
        return kind, *(_part(each, handles) for each in given)
    if kind is slice:
        return kind, *(_part(each, handles) for each in (given.start, given.stop, given.step))
    if isinstance(given, core.dtype):
        return core.dtype, given.name
    raise UnknownError


class _Step(NamedTuple):
    """A call of a method of the interpreter's builder. operands: places, or objects that are always the same."""

    name: str
    method: Callable[..., Any]
    operands: tuple[tuple[bool, Any], ...]
    results: range  # places


class Recorder:
    """Stands for the interpreter's builder during a call, and records its steps.

    Each handle of a tensor has a place: first those that the call was given, then those of results.
    """

    current: "Recorder | None" = None

    def __init__(self, builder: Any, handles: list[TensorHandle]) -> None:
        self._builder, self._num_given = builder, len(handles)
        self._handles = list(handles)  # kept, so that no other object has the number of one
        self._places = {id(handle): place for place, handle in enumerate(handles)}
        self._constants: dict[int, TensorHandle] = {}
        self._steps: list[_Step] = []
        self.is_complete = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        return partial(self._call, name, member) if callable(member) else member

    def _operand(self, given: Any) -> tuple[bool, Any]:
        if isinstance(given, TensorHandle):
            if (place := self._places.get(id(given))) is not None:
                return True, place
            self.is_complete &= id(given) in self._constants
        elif isinstance(given, list | tuple):
            self.is_complete &= not any(isinstance(each, TensorHandle) for each in given)
        return False, given

    def _call(self, name: str, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        made = method(*given, **options)
        operands = tuple(map(self._operand, given))
        results = () if made is None else made if isinstance(made, tuple | list) else (made,)
        of_tensors = all(isinstance(each, TensorHandle) for each in results)
        if name.startswith("get_"):
            self._constants.update((id(each), each) for each in results if isinstance(each, TensorHandle))
        elif not results or name in _OF_PROGRAMS or any(is_place for is_place, _ in operands):
            self.is_complete &= name.startswith("create_") and of_tensors and not options
            places = range(len(self._handles), len(self._handles) + len(results))
            self._steps.append(_Step(name, method, operands, places))
            self._handles.extend(results)
            self._places.update(zip(map(id, results), places, strict=True))
        else:
            self.is_complete &= of_tensors
            self._constants.update((id(each), each) for each in results)
        return made

    def _result(self, given: Any) -> Any:
        if isinstance(given, core.tensor):
            return core.tensor, self._operand(given.handle), given.type
        if isinstance(given, tuple | list):
            return type(given), [self._result(each) for each in given]
        self.is_complete &= given is None or isinstance(given, core.constexpr | core.dtype | int | float | str)
        return None, given

    def recipe(self, result: Any) -> "Recipe | None":
        """Return the call's, if all that it did could be recorded."""
        found = self._result(result)
        if not self.is_complete:
            return None
        return Recipe(self._num_given, len(self._handles), self._needed(self._spread(), found), found)

    def _spread(self) -> list[_Step]:
        """Have NumPy enlarge the operands of elementwise steps, where the result is as large."""
        sources: dict[int, int] = {}
        found = []
        for step in self._steps:
            if step.name in _ELEMENTWISE:
                operands = tuple((at, sources.get(value, value) if at else value) for at, value in step.operands)
                handles = (self._handles[value] if at else value for at, value in operands)
                sizes = [_size(each) for each in handles if isinstance(each, TensorHandle)]
                if np.broadcast_shapes(*sizes) == _size(self._handles[step.results[0]]):
                    step = step._replace(operands=operands)
            elif step.name in _ENLARGING:
                at, source = step.operands[_ENLARGING[step.name]]
                if at:
                    sources[step.results[0]] = sources.get(source, source)
            found.append(step)
        return found

    @staticmethod
    def _needed(steps: list[_Step], result: Any) -> list[_Step]:
        """Leave out the steps whose results are not used."""
        used, kept = set(_places(result)), []
        for step in reversed(steps):
            if not step.results or used.intersection(step.results):
                kept.append(step)
                used.update(value for at, value in step.operands if at)
        return kept[::-1]


def _size(handle: TensorHandle) -> tuple[int, ...]:
    """Of a block in one program."""
    return handle.data.shape[handle.varies :]


def _places(result: Any) -> Iterable[int]:
    """Of the tensors of a result."""
    kind, what, *_ = result
    if kind is core.tensor:
        yield from (what[1],) if what[0] else ()
    elif kind is not None:
        for each in what:
            yield from _places(each)


class Recipe:
    """The steps of a call. All that they take are objects in a list, by their places."""

    def __init__(self, num_given: int, num_places: int, steps: list[_Step], result: Any) -> None:
        self._constants: list[Any] = [None] * (num_places - num_given)
        self._num_given = num_given
        self._steps = [(step.method, self._getter(step), step.results.start, len(step.results)) for step in steps]
        self._result = result
        kind, what, *types = result
        #: Place and type of a result that is one tensor.
        self._tensor = (what[1], types[0]) if kind is core.tensor and what[0] else None

    def _getter(self, step: _Step) -> Callable[[list[Any]], tuple[Any, ...]]:
        places = [value if at else self._place_of(value) for at, value in step.operands]
        if len(places) > 1:
            return itemgetter(*places)
        return lambda objects: tuple(objects[place] for place in places)

    def _place_of(self, constant: Any) -> int:
        self._constants.append(constant)
        return self._num_given + len(self._constants) - 1

    def follow(self, handles: list[TensorHandle]) -> Any:
        """Take the steps with these handles."""
        objects: list[Any] = handles + self._constants
        for method, getter, place, num_results in self._steps:
            made = method(*getter(objects))
            if num_results == 1:
                objects[place] = made
            elif num_results:
                objects[place : place + num_results] = made
        if self._tensor is not None:
            return core.tensor(objects[self._tensor[0]], self._tensor[1])
        return self._made(self._result, objects)

    def _made(self, result: Any, objects: list[Any]) -> Any:
        kind, what, *types = result
        if kind is core.tensor:
            return core.tensor(objects[what[1]] if what[0] else what[1], types[0])
        if kind is None:
            return what
        each = [self._made(one, objects) for one in what]
        return each if kind is list else kind(each)


def _own(given: Any) -> Any:
    """A tensor with a handle of its own: two operands of the next call with this recipe may be different ones."""
    if type(given) is not core.tensor:
        return given
    handle = TensorHandle(given.handle.data, given.handle.dtype)
    handle.varies = given.handle.varies
    return core.tensor(handle, given.type)


def _recorded(call: Callable[..., Any], given: Iterable[Any], options: dict[str, Any]) -> tuple[Any, Recipe | None]:
    semantic = interpreter.interpreter_semantic
    given, options = [_own(each) for each in given], {name: _own(each) for name, each in options.items()}
    handles: list[TensorHandle] = []
    for each in (*given, *options.values()):
        _part(each, handles)
    if len(set(map(id, handles))) < len(handles):  # within a tuple
        return call(*given, **options, _semantic=semantic), None
    builder = semantic.builder
    recorder = Recorder.current = semantic.builder = Recorder(builder, handles)
    try:
        result = call(*given, **options, _semantic=semantic)
    finally:
        Recorder.current, semantic.builder = None, builder
    return result, recorder.recipe(result)


@cache
def _interpreted(member: Any) -> Callable[..., Any]:
    """Return what stands for a built-in function."""
    called, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic
    known: dict[Any, Recipe | None] = {}
    tensor = core.tensor

    def call(*given: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        if Recorder.current is not None:
            return called(*given, **options, _semantic=semantic)
        handles: list[TensorHandle] = []
        parts: list[Any] = []
        try:
            for each in given:
                if type(each) is tensor:
                    parts.append(each.type.name)
                    handles.append(each.handle)
                else:
                    parts.append(_part(each, handles))
            for name, each in options.items():
                parts.append((name, _part(each, handles)))
        except UnknownError:
            return called(*given, **options, _semantic=semantic)
        key = tuple(parts)
        if (recipe := known.get(key)) is not None:
            return recipe.follow(handles)
        if key in known:
            return called(*given, **options, _semantic=semantic)
        result, known[key] = _recorded(called, given, options)
        return result

    return call


def install(package: Any) -> None:
    """Replace a package's built-in functions for good: the interpreter does while a kernel runs, each time."""
    for name in dir(package):
        if is_builtin(member := getattr(package, name)):
            setattr(package, name, _interpreted(member))
