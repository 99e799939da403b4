"""restore: the objects of a snapshot, made anew from its bytes (core/capture/snapshot.py).

The bytes come from a file, so nothing in them is code: classes are looked up by name in the packages of the state,
and their objects are made without calling them. What does not fit is a CaptureFileError.
"""

import importlib
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from core.capture.snapshot import HOME_PACKAGE, PACKAGES, REFERENCE
from ipc.errors import CaptureFileError
from ipc.wire.messages import DECODE_ERRORS

#: Most bytes of a snapshot that is read; a larger one is no engine's.
MAX_BYTES = 1 << 30

_BAD = (
    *DECODE_ERRORS,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
    zlib.error,
)


def restore(data: bytes) -> Any:
    """Return the root of a snapshot. Errors: CaptureFileError."""
    try:
        opened = zlib.decompressobj()
        raw = opened.decompress(data, MAX_BYTES)
        if not opened.eof:
            raise CaptureFileError(f"a checkpoint that is not whole, or of more than {MAX_BYTES} bytes")
        batches, root = msgspec.msgpack.decode(raw)
        return _Objects([node for batch in batches for node in batch]).value(root)
    except _BAD as error:
        raise CaptureFileError(f"a checkpoint that this version cannot read: {type(error).__name__}: {error}") from None


@lru_cache(256)
def _class(name: str) -> Any:
    """Return the class of this name. Errors: CaptureFileError for one that is not of the state's packages."""
    module, _, path = name.partition(":")
    if not any(module == package or module.startswith(f"{package}.") for package in PACKAGES):
        raise CaptureFileError(f"a checkpoint names the class {name!r}, which is none of an engine's state")
    found: Any = importlib.import_module(HOME_PACKAGE + module)
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or found.__module__ != HOME_PACKAGE + module:
        raise CaptureFileError(f"a checkpoint names {name!r}, which is no class of that module")
    return found


class _Objects:
    """The nodes of a snapshot as objects."""

    def __init__(self, nodes: list[list[Any]]) -> None:
        self._nodes = nodes
        self._made: list[Any] = [None] * len(nodes)
        late = []  # made from objects that must be there before
        for number, node in enumerate(nodes):
            if node[0] in ("view", "struct", "named"):
                late.append(number)
            else:
                self._made[number] = _shell(node)
        for number in late:
            self._make(number)
        self._late: list[tuple[Any, dict[str, Any]]] = []  # objects that look at others when they get their parts
        for number, node in enumerate(nodes):
            self._fill(self._made[number], node)
        for made, values in self._late:
            made.set_parts(values)

    def value(self, value: Any) -> Any:
        """Return what a value stands for."""
        kind = type(value)
        if kind is msgspec.msgpack.Ext:
            if value.code != REFERENCE:
                raise CaptureFileError(f"a checkpoint with a value of the unknown kind {value.code}")
            return self._get(int.from_bytes(value.data, "little"))
        if kind is not list:
            return value
        match value:
            case ["tuple", *parts]:
                return tuple(map(self.value, parts))
            case ["enum", name, number]:
                return _class(name)(number)
            case ["scalar", dtype, data]:
                return np.frombuffer(data, dtype)[0]
            case ["dtype", dtype]:
                return np.dtype(dtype)
            case ["method", owner, name]:
                return getattr(self.value(owner), name)
            case ["list", *parts]:
                return parts
            case ["array", dtype, data]:
                return np.frombuffer(data, dtype).copy()
            case ["message", name, data]:
                return msgspec.msgpack.decode(data, type=_class(name))
            case _:
                pass
        raise CaptureFileError(f"a checkpoint with a value of the unknown kind {value[:1]}")

    def _make(self, number: int) -> None:
        """Make an object, and before it those that it refers to, whose chains may be longer than the stack is deep."""
        pending = [number]
        while pending:
            missing = [one for one in _references(self._nodes[pending[-1]]) if self._made[one] is None]
            if missing:
                pending += missing
            else:
                self._get(pending.pop())

    def _get(self, number: int) -> Any:
        made = self._made[number]
        if made is None:
            match self._nodes[number]:
                case ["view", dtype, shape, strides, offset, base]:
                    made = np.ndarray(shape, dtype, self.value(base), offset, strides)
                case ["named", name, *parts]:
                    made = _class(name)._make(map(self.value, parts))
                case ["struct", name, *parts]:
                    made = _struct(_class(name), [self.value(part) for part in parts])
                case _:
                    pass
            self._made[number] = made
        return made

    def _fill(self, made: Any, node: list[Any]) -> None:
        match node:
            case ["list" | "deque", *parts]:
                made.extend(map(self.value, parts))
            case ["set", *parts]:
                made.update(map(self.value, parts))
            case ["dict", _, *parts]:
                each = map(self.value, parts)
                made.update(zip(each, each, strict=True))
            case ["object", _, names, *parts]:
                values = dict(zip(names, map(self.value, parts), strict=True))
                if hasattr(made, "set_parts"):
                    self._late.append((made, values))
                else:
                    made.__dict__.update(values)
            case _:
                pass


def _references(value: list[Any]) -> Iterator[int]:
    """Yield the numbers of the nodes that a node or a value refers to."""
    for part in value:
        if type(part) is msgspec.msgpack.Ext:
            yield int.from_bytes(part.data, "little")
        elif type(part) is list:
            yield from _references(part)


def _shell(node: list[Any]) -> Any:
    """Return the object of a node without its parts; an array is whole."""
    match node:
        case ["array", dtype, shape, data]:
            return np.frombuffer(data, dtype).reshape(shape).copy()
        case ["list", *_]:
            return []
        case ["deque", *_]:
            return deque()
        case ["set", *_]:
            return set()
        case ["dict", is_ordered, *_]:
            return OrderedDict() if is_ordered else {}
        case ["object", name, *_]:
            return object.__new__(_class(name))
        case _:
            pass
    raise CaptureFileError(f"a checkpoint with an object of the unknown kind {node[:1]}")


def _struct(kind: Any, parts: list[Any]) -> msgspec.Struct:
    """Make a struct; fields that it did not have yet when the parts were written have their defaults."""
    if len(parts) > len(kind.__struct_fields__):
        raise ValueError(f"{kind.__name__} with {len(parts)} fields")
    made: msgspec.Struct = kind(**dict(zip(kind.__struct_fields__, parts, strict=False)))
    return made
