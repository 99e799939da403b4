"""restore: rebuilds the objects of a snapshot from its bytes (core/capture/snapshot.py).

The bytes come from a file that may be untrusted. So they determine only values: classes, fields and methods are those
of core/capture/state_classes.py, objects are created without calling them, arrays are created from dtype, shape and
bytes, and each field must have a value of its declared type. The cost is bounded by the file's size before it is paid.
Anything invalid raises CaptureFileError.
"""

import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from core.capture.snapshot import BATCH, REFERENCE
from core.capture.state_classes import ENUMS, FIELDS, MESSAGES, METHODS, NAMED, OBJECTS, STATE, STRUCTS
from core.capture.state_types import find_misfit
from core.scheduling.scheduler import Scheduler
from ipc.errors import CaptureFileError
from ipc.wire.messages import DECODE_ERRORS

#: The most bytes of an unpacked snapshot. No engine writes a larger one.
MAX_BYTES = 1 << 30
#: The most unpacked bytes per packed byte, after the first MiB: zlib's level 1 makes at most 228.
MAX_RATIO = 256
#: The most bytes of everything except arrays, and of one object: as Python objects they take up to 64 times as much.
MAX_OBJECT_BYTES = 64 << 20
MAX_NODE_BYTES = 16 << 20
#: The most objects, and the most levels of nested values: a snapshot has three.
MAX_NODES = 1 << 22
MAX_NESTED = 8

_DTYPES = frozenset(
    np.dtype(kind).str for kind in (bool, "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")
)
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_INLINE = frozenset({"array", "enum", "list", "message", "method", "scalar", "tuple"})
_LATE = frozenset({"named", "struct", "view"})  # made from objects that must exist first

_Kind = TypeVar("_Kind")
_Ext = msgspec.msgpack.Ext
_Batch = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=BATCH)]
_Batches = Annotated[list[_Batch], msgspec.Meta(max_length=MAX_NODES // BATCH)]
_decode_whole = msgspec.msgpack.Decoder(tuple[_Batches, _Ext]).decode
_decode_array = msgspec.msgpack.Decoder(tuple[str, str, Annotated[list[int], msgspec.Meta(max_length=4)], bytes]).decode
_MESSAGE_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in MESSAGES.items()}
_decode_node = msgspec.msgpack.Decoder(list[Any]).decode
_ARRAY_HEAD = msgspec.msgpack.encode(["array", "", [], b""])[:7]  # start of a node that is an array

_BAD = (
    *DECODE_ERRORS,
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def restore(data: bytes) -> list[Any]:
    """Return the EngineCore.state() of a snapshot. Errors: CaptureFileError."""
    try:
        batches, root = _decode_whole(_unpack(data))
        nodes = [node for batch in batches for node in batch]
        if sum(len(node) for node in nodes if not _is_array(node)) > MAX_OBJECT_BYTES:
            raise CaptureFileError(f"a checkpoint with objects of more than {MAX_OBJECT_BYTES} bytes")
        objects = _Objects([_decode(node) for node in nodes])
        return objects.finish(root)
    except (*_BAD, zlib.error) as error:
        raise CaptureFileError(f"a checkpoint that this version cannot read: {type(error).__name__}: {error}") from None


def _unpack(data: bytes) -> bytes:
    most = min(MAX_BYTES, (1 << 20) + MAX_RATIO * len(data))
    opened = zlib.decompressobj()
    raw = opened.decompress(data, most)
    if not opened.eof:
        raise CaptureFileError(f"a checkpoint that is not whole, or of more than {most} bytes")
    return raw


def _is_array(node: msgspec.Raw) -> bool:
    return bytes(memoryview(node)[: len(_ARRAY_HEAD)]) == _ARRAY_HEAD


def _decode(raw: msgspec.Raw) -> list[Any]:
    """Return a node. What no snapshot has, such as maps and empty lists, is refused before the next node is decoded."""
    if _is_array(raw):
        return list(_decode_array(raw))
    if len(raw) > MAX_NODE_BYTES:
        raise CaptureFileError(f"a checkpoint with an object of more than {MAX_NODE_BYTES} bytes")
    node = _decode_node(raw)
    _check_values(node)
    return node


def _check_values(parts: list[Any], most_nested: int = MAX_NESTED) -> None:
    """Check the types of values, and how deeply they are nested. Errors: CaptureFileError."""
    for part in parts:
        kind = type(part)
        if kind is list:
            if not part or part[0] not in _INLINE:
                raise CaptureFileError("a checkpoint with a value of an unknown kind")
            if not most_nested:
                raise CaptureFileError(f"a checkpoint with values of more than {MAX_NESTED} levels")
            _check_values(part, most_nested - 1)
        elif kind is not _Ext and kind not in _ATOMS:
            raise CaptureFileError(f"a checkpoint with a value of the unknown kind {kind.__name__}")


class _Objects:
    """The nodes of a snapshot as objects."""

    def __init__(self, nodes: list[list[Any]]) -> None:
        self._nodes = nodes
        self._made: list[Any] = [None] * len(nodes)
        self._types: list[tuple[Any, Any]] = []  # values and the types that they must have in the end
        self._late: list[tuple[Any, dict[str, Any]]] = []  # objects that use others when they get their parts
        late = []
        for number, node in enumerate(nodes):
            if node[0] in _LATE:
                late.append(number)
            else:
                self._made[number] = _shell(node)
        for number in late:
            self._make(number)

    def finish(self, root: _Ext) -> list[Any]:
        """Give all objects their parts, check the parts' types, and return the state."""
        for made, node in zip(self._made, self._nodes, strict=True):
            self._fill(made, node)
        state = self._value(root)
        if type(state) is not list or len(state) != len(STATE):
            raise CaptureFileError("a checkpoint whose root is no engine's state")
        misfit = find_misfit([*self._types, *zip(state, STATE, strict=True)])
        if misfit is not None:
            raise CaptureFileError(f"a checkpoint with {type(misfit[0]).__name__} instead of {misfit[1]}")
        for made, values in self._late:
            type(made).set_parts(made, values)
        _check_integrity(state[1])
        return state

    def _value(self, value: Any) -> Any:
        """Return the object for a value."""
        kind = type(value)
        if kind is _Ext:
            return self._made[self._number(value)]
        if kind is not list:
            return value
        match value:
            case ["tuple", *parts]:
                return tuple(map(self._value, parts))
            case ["list", *parts]:
                return parts if _ATOMS.issuperset(map(type, parts)) else list(map(self._value, parts))
            case ["enum", str(name), int(number)]:
                return _known(ENUMS, name)(number)
            case ["scalar", str(dtype), bytes(data)]:
                return _array(dtype, [1], data)[0]
            case ["array", str(dtype), bytes(data)]:
                return _array(dtype, [-1], data)
            case ["method", owner, str(name)]:
                return _method(self._value(owner), name)
            case ["message", str(name), bytes(data)]:
                return _known(_MESSAGE_DECODERS, name).decode(data)
            case _:
                pass
        raise CaptureFileError(f"a checkpoint with a value of the unknown kind {value[0]}")

    def _number(self, reference: _Ext) -> int:
        number = int.from_bytes(reference.data, "little")
        if reference.code != REFERENCE or number >= len(self._nodes):
            raise CaptureFileError("a checkpoint with a reference to a missing object")
        return number

    def _make(self, number: int) -> None:
        """Make an object, after those that it refers to. Chains of references may be longer than the stack is deep."""
        pending, begun = [number], set[int]()
        while pending:
            number = pending[-1]
            if self._made[number] is not None:
                pending.pop()
                continue
            missing = [one for one in self._references(self._nodes[number]) if self._made[one] is None]
            if not missing:
                self._made[number] = self._late_object(self._nodes[number])
            elif number in begun:
                raise CaptureFileError("a checkpoint with an object that must be there before itself")
            else:
                begun.add(number)
                pending += missing

    def _references(self, value: list[Any]) -> Iterator[int]:
        """Yield the numbers of the nodes that a node or value refers to."""
        for part in value:
            if type(part) is _Ext:
                yield self._number(part)
            elif type(part) is list:
                yield from self._references(part)

    def _late_object(self, node: list[Any]) -> Any:
        match node:
            case ["view", str(dtype), shape, strides, int(offset), base]:
                return _view(dtype, self._value(shape), self._value(strides), offset, self._value(base))
            case ["named", str(name), *parts]:
                named = _known(NAMED, name)
                return tuple.__new__(named, self._typed(named, parts).values())
            case ["struct", str(name), *parts]:
                struct = _known(STRUCTS, name)
                return struct(**self._typed(struct, parts))
            case _:
                pass
        raise CaptureFileError(f"a checkpoint with an object of the unknown kind {node[0]}")

    def _typed(self, kind: type, parts: list[Any]) -> dict[str, Any]:
        """Return an object's fields by name, and record their types."""
        hints = FIELDS[kind]
        values = dict(zip(hints, map(self._value, parts), strict=True))
        self._types += zip(values.values(), hints.values(), strict=True)
        return values

    def _fill(self, made: Any, node: list[Any]) -> None:
        match node:
            case ["list" | "deque", *parts]:
                made.extend(map(self._value, parts))
            case ["set", *parts]:
                made.update(map(_key, map(self._value, parts)))
            case ["dict", _, *parts]:
                each = list(map(self._value, parts))
                made.update(zip(map(_key, each[::2]), each[1::2], strict=True))
            case ["object", _, *parts]:
                values = self._typed(type(made), parts)
                if hasattr(type(made), "set_parts"):
                    self._late.append((made, values))
                else:
                    made.__dict__.update(values)
            case _:
                pass


def _check_integrity(scheduler: Scheduler) -> None:
    """Check the scheduler's own invariants, which hold between two steps. Errors: CaptureFileError.

    Columns from the file may lead to a division by zero, for which NumPy only warns.
    """
    try:
        with np.errstate(all="raise"):
            scheduler.check_integrity()
    except (*_BAD, AssertionError) as error:
        raise CaptureFileError(
            f"a checkpoint with a state that no engine can have had: {type(error).__name__}: {error}"
        ) from None


def _shell(node: list[Any]) -> Any:
    """Return a node's object without its parts. An array is complete."""
    match node:
        case ["array", str(dtype), shape, bytes(data)]:
            return _array(dtype, shape, data)
        case ["list", *_]:
            return []
        case ["deque", *_]:
            return deque()
        case ["set", *_]:
            return set()
        case ["dict", bool(is_ordered), *_]:
            return OrderedDict() if is_ordered else {}
        case ["object", str(name), *_]:
            return object.__new__(_known(OBJECTS, name))
        case _:
            pass
    raise CaptureFileError(f"a checkpoint with an object of the unknown kind {node[0]}")


def _known(kinds: Mapping[str, _Kind], name: str) -> _Kind:
    """Return the registry's entry for the name. Errors: CaptureFileError."""
    if name not in kinds:
        raise CaptureFileError(f"a checkpoint names {name!r:.80}, which is not part of an engine's state")
    return kinds[name]


def _key(value: Any) -> Any:
    """Return a key of a dict: an atom, or a tuple of atoms, because hashing a deep object would overflow the stack."""
    if type(value) in _ATOMS or (type(value) is tuple and _ATOMS.issuperset(map(type, value))):
        return value
    raise CaptureFileError(f"a checkpoint with a key of the kind {type(value).__name__}")


def _method(owner: Any, name: str) -> MethodType:
    """Return a method of an object of the state. Its field decides whether it may hold this method."""
    if type(owner) not in FIELDS or name not in METHODS:
        raise CaptureFileError(f"a checkpoint with the method {name} of {type(owner).__name__}")
    return MethodType(getattr(type(owner), name), owner)


def _dtype(name: str) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise CaptureFileError("a checkpoint with an array of an unknown dtype")
    return np.dtype(name)


def _array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    """Return an array with its own memory. Errors: ValueError for data of another length."""
    return np.frombuffer(data, _dtype(dtype)).reshape(shape).copy()


def _view(dtype: str, shape: Any, strides: Any, offset: int, base: Any) -> np.ndarray[Any, Any]:
    """Return a view of a whole array. Errors: CaptureFileError if it reaches beyond the array or has more elements."""
    kind, each = _dtype(dtype), (*shape, *strides, offset)
    if type(base) is not np.ndarray or set(map(type, each)) != {int} or len(shape) != len(strides):
        raise CaptureFileError("a checkpoint with a view of no array")
    steps = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    first = offset + sum(step for step in steps if step < 0)
    last = offset + sum(step for step in steps if step > 0) + kind.itemsize
    is_empty = 0 in shape
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize > base.nbytes:
        raise CaptureFileError("a checkpoint with a view of more elements than its array has")
    if not is_empty and not 0 <= first <= last <= base.nbytes:
        raise CaptureFileError("a checkpoint with a view that reaches beyond its array")
    return np.ndarray(shape, kind, base, offset, strides)
