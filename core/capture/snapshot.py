"""Snapshot: an engine core's state as data: all objects that its later steps depend on, found by following references.

Objects do not list their own fields, so none can be forgotten; one with parts() and set_parts() gives larger parts. A
snapshot is taken between two steps, in two parts. The engine thread copies what may change (columns, containers,
attributes). Another thread turns the copies into bytes.

A snapshot's bytes are zlib-compressed msgpack: [batches of nodes, value]. A node is an object that others may share,
and a value refers to one by its number. core/capture/restore.py reads them. They contain no code: classes are named,
and only those of core/capture/state_classes.py are allowed.
"""

import copy
import gc
import operator
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from itertools import chain, compress
from types import MethodType
from typing import Any

import msgspec
import numpy as np

from core.batch.request import Request
from core.capture.early_copies import EarlyCopies
from core.capture.state_classes import FIELDS, MESSAGES, UnknownObjectError, class_name
from core.scheduling.draft import Draft

#: Code of the msgpack extension type whose 4 bytes, little-endian, are the number of a node.
REFERENCE = 1
#: Nodes that encode() converts without a pause: about 0.2 ms.
BATCH = 32

#: From this many objects on, the requests among them are taken all at once.
_MANY = 16
#: From this many entries on, a dict whose first key and value are numbers is treated as a dict of numbers.
_MANY_NUMBERS = 1000
_block_hashes = operator.attrgetter("block_hashes")
_copy_request: Callable[[Request], Request] = Request.__copy__  # type: ignore[attr-defined]

_Array = np.ndarray[Any, Any]
_LARGE_BYTES = 1 << 15  # size from which the memory of an array's copy is reused

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_encoder = msgspec.msgpack.Encoder()


class CopySpace:
    """Memory for copies of large arrays, reused by the next snapshot: fresh memory costs ten times the copy."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[_Array]] = {}  # by shape and dtype

    def copy(self, value: _Array) -> _Array:
        """Return a copy of a large array."""
        free = self._free.get((value.shape, value.dtype))
        made = free.pop() if free else np.empty(value.shape, value.dtype)
        np.copyto(made, value)
        return made

    def give_back(self, copies: Iterable[_Array]) -> None:
        """Keep the memory of these copies, which are no longer read, and of no others."""
        free: dict[tuple[Any, ...], list[_Array]] = {}
        for one in copies:
            if one.nbytes >= _LARGE_BYTES:
                free.setdefault((one.shape, one.dtype), []).append(one)
        self._free = free


class Snapshot:
    """The state that can be reached from `root`, as it is now.

    space: the caller's, the same for all of its snapshots. early: copies of some requests. Errors: UnknownObjectError.
    """

    def __init__(self, root: object, space: CopySpace | None = None, early: EarlyCopies | None = None) -> None:
        self._root = root
        self._space = space or CopySpace()
        self._nodes: list[tuple[object, Any]] = []  # an object, and a copy of its parts
        self._place: dict[int, int] = {}  # by id of the object, which its node keeps alive
        self._known: set[int] = set()  # by id: objects all of whose parts are already in a node
        collects = gc.isenabled()
        gc.disable()  # thousands of copies would trigger it although none is garbage; it took half of the time
        try:
            if early is not None:
                self._known, nodes, self._place = early.valid()
                self._nodes += nodes
            self._take(root)
        finally:
            if collects:
                gc.enable()

    def _take(self, root: object) -> None:
        pending = [root]
        while pending:
            value = pending.pop()
            if id(value) in self._place:
                continue
            if type(value) is Request:
                self._take_requests([value], pending)
                continue
            if type(value) is np.ndarray and not isinstance(value.base, np.ndarray):
                self._place[id(value)] = len(self._nodes)
                copied = value.copy() if value.nbytes < _LARGE_BYTES else self._space.copy(value)
                self._nodes.append((value, copied))
                continue
            if self._known and type(value) is list:
                parts, children = self._take_known(value)
            else:
                parts, children = (_TAKERS.get(type(value)) or _taker_of(type(value)))(value)
            if parts is not None:
                self._place[id(value)] = len(self._nodes)
                self._nodes.append((value, parts))
            if len(children) >= _MANY and Request in (kinds := set(map(type, children))):
                self._take_requests(
                    children if len(kinds) == 1 else [c for c in children if type(c) is Request], pending
                )
                children = () if len(kinds) == 1 else [one for one in children if type(one) is not Request]
            pending += children

    def _take_known(self, value: list[Any]) -> "_Taken":
        """Take a list without checking what is known: checking thousands of objects costs more than copying them."""
        known = self._known
        if known.issuperset(map(id, value)):
            return value.copy(), ()
        are_new = map(operator.not_, map(known.__contains__, map(id, value)))
        return value.copy(), _take_list(list(compress(value, are_new)))[1]

    def _take_requests(self, requests: Collection[Request], pending: list[Any]) -> None:
        """Take thousands of requests at once, without a Python call for each.

        Their tokens, which are never written to, are not nodes.
        """
        place, first = self._place, len(self._nodes)
        fresh = {key: one for one in requests if (key := id(one)) not in place}
        copies: list[Request] = list(map(_copy_request, fresh.values()))
        num_hashes = map(len, map(_block_hashes, copies))  # the list only ever grows
        for one in copies:
            if one.choices or one.swapped:
                pending += (one.choices, one.swapped)
        place.update(zip(fresh, range(first, first + len(fresh)), strict=True))
        self._nodes += zip(fresh.values(), zip(copies, num_hashes, strict=True), strict=True)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes)

    def objects(self) -> list[object]:
        """Return all objects that are nodes, until encode() is called."""
        return [value for value, _ in self._nodes]

    def encode(self, pause: Callable[[], None] = lambda: None) -> bytes:
        """Return the bytes, once. Any thread may call this. pause is called now and then to let other threads run."""
        batches, nodes, arrays = [], self._nodes, list[_Array]()
        for first in range(0, len(nodes), BATCH):
            pause()
            some = nodes[first : first + BATCH]
            batches.append(msgspec.Raw(_encoder.encode([self._node(value, parts) for value, parts in some])))
            arrays += [parts for _, parts in some if type(parts) is np.ndarray]
            # The copies are freed here, a few at a time. The objects are kept, so that their ids are not reused.
            nodes[first : first + BATCH] = [(value, None) for value, _ in some]
        self._space.give_back(arrays)
        pause()
        data = _encoder.encode([batches, self._value(self._root)])
        pause()
        return zlib.compress(data, 1)

    def _node(self, value: object, parts: Any) -> list[Any]:
        """Return [kind, ...] of one node."""
        kind = type(value)
        match value:
            case np.ndarray():
                if isinstance(parts, np.ndarray):
                    return ["array", parts.dtype.str, parts.shape, parts.tobytes()]
                layout = ["tuple", *value.shape], ["tuple", *value.strides], parts[1]
                return ["view", value.dtype.str, *layout, self._value(parts[0])]
            case list():
                return ["list", *self._values(parts)]
            case deque():
                return ["deque", *self._values(parts)]
            case set():
                return ["set", *self._values(parts)]
            case dict():
                return ["dict", kind is OrderedDict, *self._values(chain.from_iterable(parts.items()))]
            case Request():
                copied, num_hashes = parts
                copied.block_hashes = copied.block_hashes[:num_hashes]
                return ["struct", class_name(kind), *self._values(msgspec.structs.astuple(copied))]
            case tuple():
                return ["named", class_name(kind), *self._values(parts)]
            case msgspec.Struct():
                return ["struct", class_name(kind), *self._values(msgspec.structs.astuple(parts))]
            case _:
                pass
        return ["object", class_name(kind), *self._values(map(parts.__getitem__, FIELDS[kind]))]

    def _values(self, values: Iterable[object]) -> Iterator[Any]:
        return map(self._value, values)

    def _value(self, value: Any) -> Any:
        """Return an atom unchanged, a reference to a node, or [kind, ...] of an immutable value."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if (place := self._place.get(id(value))) is not None:
            return msgspec.msgpack.Ext(REFERENCE, place.to_bytes(4, "little"))
        match value:
            case Draft():
                return None  # the previous step's, which objects keep in order to recognise the next step
            case Enum():
                return ["enum", class_name(kind), value.value]
            case np.generic():
                return ["scalar", value.dtype.str, value.tobytes()]
            case MethodType():
                return ["method", self._value(value.__self__), value.__name__]
            case tuple():
                return ["tuple", *self._values(value)]
            case list():  # of a request: numbers, or uses of features
                return ["list", *(self._values(value) if value and type(value[0]) not in _ATOMS else value)]
            case np.ndarray():
                return ["array", value.dtype.str, value.tobytes()]
            case _:
                pass
        return ["message", class_name(kind), _encoder.encode(value)]


# --- what is copied for each type of object: (a copy of its parts, objects to follow) ---------------------------------

_Taken = tuple[Any, Collection[Any]]


def _others(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if type(value) not in _ATOMS]


def _take_inline(value: Any) -> _Taken:
    """Take a value that has no parts that could change."""
    return None, ()


def _take_tuple(value: tuple[Any, ...]) -> _Taken:
    return None, _others(value)


def _take_named(value: tuple[Any, ...]) -> _Taken:
    """Take a named tuple as a node: some are links of long chains that share their beginnings."""
    return value, _others(value)


def _take_method(value: MethodType) -> _Taken:
    return None, [value.__self__]


def _take_list(value: list[Any]) -> _Taken:
    parts = value.copy()
    kinds = set(map(type, parts))
    if kinds <= _ATOMS:
        return parts, ()
    if kinds.isdisjoint(_ATOMS) and tuple not in kinds:
        return parts, parts
    return parts, _others(chain.from_iterable(parts) if kinds == {tuple} else parts)


def _take_items(value: Iterable[Any]) -> _Taken:
    parts = list(value)
    return parts, _others(parts)


def _take_dict(value: dict[Any, Any]) -> _Taken:
    parts = value.copy()
    if len(parts) >= _MANY_NUMBERS and all(type(one) is int for one in next(iter(parts.items()))):
        return parts, ()
    children = _others(parts) if not _ATOMS.issuperset(map(type, parts)) else []
    kinds = set(map(type, parts.values()))
    if not kinds <= _ATOMS:
        children += parts.values() if kinds.isdisjoint(_ATOMS) else _others(parts.values())
    return parts, children


def _take_view(value: _Array) -> _Taken:
    base = value.base
    assert isinstance(base, np.ndarray), "an array with memory of its own"
    places = [one.__array_interface__["data"][0] for one in (value, base)]
    return (base, places[0] - places[1]), (base,)


def _take_struct(value: msgspec.Struct) -> _Taken:
    parts = copy.copy(value)
    return parts, _others(msgspec.structs.astuple(parts))


def _take_object(value: Any) -> _Taken:
    parts = value.parts() if hasattr(value, "parts") else dict(value.__dict__)
    if parts.keys() != FIELDS[type(value)].keys():
        names = ", ".join(sorted(parts.keys() ^ FIELDS[type(value)].keys()))
        raise UnknownObjectError(f"{class_name(type(value))} has fields that differ from the state's registry: {names}")
    return parts, _others(parts.values())


_TAKERS: dict[type, Callable[[Any], _Taken]] = {
    **dict.fromkeys(_ATOMS, _take_inline),
    tuple: _take_tuple,
    MethodType: _take_method,
    list: _take_list,
    deque: _take_items,
    set: _take_items,
    dict: _take_dict,
    OrderedDict: _take_dict,
    np.ndarray: _take_view,
    Draft: _take_inline,
}


def _taker_of(kind: type) -> Callable[[Any], _Taken]:
    """Return, and cache, the function that takes objects of a class. Errors: UnknownObjectError."""
    if issubclass(kind, np.generic):
        taker = _take_inline
    else:
        name = class_name(kind)
        if issubclass(kind, Enum):
            taker = _take_inline
        elif issubclass(kind, tuple):
            taker = _take_named
        elif issubclass(kind, msgspec.Struct):
            taker = _take_inline if name in MESSAGES else _take_struct  # messages do not change
        elif hasattr(kind, "__slots__"):
            raise UnknownObjectError(f"{name} has slots")
        else:
            taker = _take_object
    _TAKERS[kind] = taker
    return taker
