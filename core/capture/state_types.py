"""Checks restored values against the types that their fields declare, down to the last entry of containers."""

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec
import numpy as np

#: Values and the types that they must have.
Pending: TypeAlias = list[tuple[Any, Any]]
_Check: TypeAlias = Callable[[Any, Pending], bool]

_CONTAINERS = (list, deque, set, dict, OrderedDict, tuple)


class Callback(msgspec.Struct, frozen=True):
    """The type of a field with a bound method. allowed: (class, name) of each that the engine itself stores there."""

    allowed: tuple[tuple[type, str], ...]
    is_optional: bool = False  # the field may be None

    def fits(self, method: Any) -> bool:
        """Return whether the value is one of these methods. A subclass may have its own version."""
        if type(method) is not types.MethodType:
            return method is None and self.is_optional
        owner = method.__self__
        return any(
            isinstance(owner, kind) and method.__func__ is getattr(type(owner), name) for kind, name in self.allowed
        )


def find_misfit(pending: Pending) -> tuple[Any, Any] | None:
    """Return the first (value, type) that does not match, including values inside others; None if all match.

    Each container is checked once per type, so cycles end. The time is linear in the number of entries.
    """
    seen: set[tuple[int, Any]] = set()
    while pending:
        value, hint = pending.pop()
        if type(value) in _CONTAINERS:
            if (key := (id(value), hint)) in seen:
                continue
            seen.add(key)
        if not _check_of(hint)(value, pending):
            return value, hint
    return None


@lru_cache(maxsize=512)
def _check_of(hint: Any) -> _Check:
    """Return the function that checks a value of this type and adds its contents to `pending`."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, Callback):
        return lambda value, pending: hint.fits(value)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Annotated:
        return _array(args[0], args[1])
    if origin is Literal:
        return lambda value, pending: type(value) in (str, bool, int) and value in args
    if hint is np.ndarray or origin is np.ndarray or _is_array_alias(hint):
        return _array(hint, 1)
    if origin in (list, deque, set):
        return _sequence(origin, args[0])
    if origin is tuple:
        return _tuple(args)
    if origin in (dict, OrderedDict, Mapping):
        return _dict(OrderedDict if origin is OrderedDict else dict, *args)
    if hint is None or hint is types.NoneType:
        return lambda value, pending: value is None
    if hint is float:
        return lambda value, pending: type(value) in (float, int)
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return lambda value, pending: type(value) is np.dtype(hint).type
    assert isinstance(hint, type), f"{hint} is not a type that a field of a checkpoint may have"
    atoms = (bool, int, str, bytes)
    return lambda value, pending: type(value) is hint if hint in atoms else isinstance(value, hint)


def _union(members: tuple[Any, ...]) -> _Check:
    """Check a union. At most one of its members may be a container of the value's class."""
    checks = [_check_of(member) for member in members]

    def check(value: Any, pending: Pending) -> bool:
        for one in checks:
            mark = len(pending)
            if one(value, pending):
                return True
            del pending[mark:]
        return False

    return check


def _sequence(kind: Any, entry: Any) -> _Check:
    atom = entry if entry in (int, str) else None

    def check(value: Any, pending: Pending) -> bool:
        if type(value) is not kind:
            return False
        if atom is not None:
            return set(map(type, value)) <= {atom}
        pending.extend((one, entry) for one in value)
        return True

    return check


def _tuple(entries: tuple[Any, ...]) -> _Check:
    def check(value: Any, pending: Pending) -> bool:
        if type(value) is not tuple:
            return False
        kinds = entries[:1] * len(value) if entries[-1] is Ellipsis else entries
        if len(kinds) != len(value):
            return False
        pending.extend(zip(value, kinds, strict=True))
        return True

    return check


def _dict(kind: Any, key: Any, entry: Any) -> _Check:
    def check(value: Any, pending: Pending) -> bool:
        if type(value) is not kind:
            return False
        pending.extend((one, key) for one in value)
        pending.extend((one, entry) for one in value.values())
        return True

    return check


def _is_array_alias(hint: Any) -> bool:
    """Return whether the type is NumPy's NDArray[...], which is an alias with a name since NumPy 2.5."""
    return getattr(hint, "__name__", "") == "NDArray"


def _array(hint: Any, num_dimensions: int) -> _Check:
    *_, last = get_args(hint)
    *_, scalar = get_args(last) or (last,)
    if scalar is Any:
        *_, scalar = get_args(hint)
    scalar = get_origin(scalar) or scalar

    def check(value: Any, pending: Pending) -> bool:
        return (
            type(value) is np.ndarray
            and value.ndim == num_dimensions
            and (scalar is np.generic or np.issubdtype(value.dtype, scalar))
        )

    return check
