"""A checkpoint is data: whatever its bytes are, they become a state of the registry's classes or a CaptureFileError."""

import ast
import inspect
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture import bounds, restore
from core.capture.bounds import bounded_memory, untrusted_file
from core.capture.snapshot import REFERENCE, Snapshot
from core.capture.state_classes import FIELDS, NAMED, OBJECTS, STRUCTS, UnknownObjectError
from core.kv.block_names import BlockNames
from core.kv.block_pool import BlockPool
from core.scheduling.admission import Delay
from ipc.errors import CaptureFileError, ConfigError
from ipc.tables.columns import Columns, _declared
from tests.core.capture.hostile_checkpoints import pack, reference, snapshot_of, unpack

ROOT = Path(__file__).parents[3]
#: What set_parts() makes of the other fields, by the class that has it.
DERIVED = {
    Columns: {"_names", "_empty", "_bound"},
    BlockNames: {"block_of_key"},
    BlockPool: {"_place"},
}


def refused(nodes: list[Any], root: Any = None) -> str:
    """Return the message with which a checkpoint of these nodes is refused."""
    with pytest.raises(CaptureFileError) as caught:
        restore.restore(pack(nodes, reference(0) if root is None else root))
    return str(caught.value)


@pytest.fixture(scope="module")
def sound() -> tuple[list[Any], Any]:
    """The nodes of an engine's checkpoint, and its root."""
    return unpack(snapshot_of())


def place_of(nodes: list[Any], kind: str, name: str = "") -> int:
    """Return the place of the first node of a kind and a class."""
    return next(place for place, node in enumerate(nodes) if node[0] == kind and (not name or node[1] == name))


def field_of(name: str, field: str) -> int:
    """Return the place of a field in an object's node."""
    return 2 + list(FIELDS[{**OBJECTS, **STRUCTS, **NAMED}[name]]).index(field)


def with_field(sound: tuple[list[Any], Any], name: str, field: str, value: Any, *more: Any) -> tuple[list[Any], Any]:
    """Return a sound checkpoint whose first object of a class has another value. more: nodes behind its own."""
    nodes, root = sound
    kind = "object" if name in OBJECTS else "struct"
    place = place_of(nodes, kind, name)
    node = list(nodes[place])
    node[field_of(name, field)] = value
    return [*nodes[:place], node, *nodes[place + 1 :], *more], root


def test_the_registry_has_the_fields_that_the_classes_assign() -> None:
    """A field or a class that is new is noticed here, also if no test's engine reaches it."""
    for name, kind in OBJECTS.items():
        assigned = set[str]()
        for base in kind.__mro__[:-1]:
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    assigned |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
        if issubclass(kind, Columns):
            assigned -= {column for columns in _declared(kind).values() for column in columns}  # type: ignore[arg-type]
        for base, names in DERIVED.items():
            assigned -= names if issubclass(kind, base) else set()
        assert assigned == set(FIELDS[kind]), name
    assert all(set(FIELDS[kind]) == set(kind.__struct_fields__) for kind in STRUCTS.values())
    assert all(tuple(FIELDS[kind]) == kind._fields for kind in NAMED.values())  # type: ignore[attr-defined]


def test_a_snapshot_has_no_object_and_no_field_beside_the_registry() -> None:
    delay = Delay(1.0)
    delay.later = 1  # type: ignore[attr-defined]
    with pytest.raises(UnknownObjectError, match="Delay has fields that differ from the state's registry: later"):
        Snapshot([delay])
    other = type("Other", (Delay,), {"__module__": "core.scheduling.other"})(1.0)
    with pytest.raises(UnknownObjectError, match=r"core\.scheduling\.other:Other is not a class"):
        Snapshot([other])


def test_a_method_is_one_that_the_field_may_hold_of_an_object_of_the_state(sound: tuple[list[Any], Any]) -> None:
    nodes, _ = sound
    scheduler, array = (
        place_of(nodes, *node) for node in (("object", "core.scheduling.scheduler:Scheduler"), ("array",))
    )
    fill = ("core.scheduling.scheduler:Scheduler", "_fill")
    assert "method ctypes of ndarray" in refused(*with_field(sound, *fill, ["method", reference(array), "ctypes"]))
    for name in ("__init__", "set_parts", "step", "__class__", "finish_client"):
        value = ["method", reference(scheduler), name]
        assert f"method {name} of Scheduler" in refused(*with_field(sound, *fill, value))
    admission = place_of(nodes, "object", "core.scheduling.admission:Admission")
    value = ["method", reference(admission), "add_limit"]  # of the state, and another field's
    assert "a checkpoint with method instead of" in refused(*with_field(sound, *fill, value))
    nested = ["method", ["method", reference(scheduler), "_running_first"], "__func__"]
    assert "method __func__ of method" in refused(*with_field(sound, *fill, nested))


def test_no_attribute_is_set_that_the_class_does_not_declare(sound: tuple[list[Any], Any]) -> None:
    """Not a method's name, and nothing that set_parts() calls."""
    nodes, root = sound
    for name in ("core.batch.table:BatchTable", "core.batch.batch:Batch", "core.kv.block_pool:BlockPool"):
        place = place_of(nodes, "object", name)
        longer = [*nodes[:place], [*nodes[place], 0], *nodes[place + 1 :]]
        assert "zip() argument 2 is longer" in refused(longer, root)
        shorter = [*nodes[:place], nodes[place][:-1], *nodes[place + 1 :]]
        assert "zip() argument 2 is shorter" in refused(shorter, root)
        named = [*nodes[:place], [*nodes[place][:2], ["list", "_bind", "rows"], 1, 2], *nodes[place + 1 :]]
        assert "zip() argument 2 is shorter" in refused(named, root)


@pytest.mark.parametrize(
    "name",
    ["os:system", "core.kv...tools.cli:main", "ipc.wire.pipes:FrameReader", "core.engine:EngineCore", "builtins:eval"],
)
def test_classes_are_those_of_the_registry_in_their_own_kind(name: str, sound: tuple[list[Any], Any]) -> None:
    for node in (["object", name], ["struct", name, 1], ["named", name, 1]):
        assert f"names '{name}', which is not part" in refused([node])
    delay = ("core.scheduling.admission:Delay", "_latency_ns")
    for value in (["enum", name, 5], ["message", name, b"\x80"]):
        assert f"names '{name}', which is not part" in refused(*with_field(sound, *delay, value))
    value = ["enum", "core.batch.request:Request", 5]
    assert "names 'core.batch.request:Request'" in refused(*with_field(sound, *delay, value))
    assert "names 'core.kv.orders:Look'" in refused([["object", "core.kv.orders:Look"]])


def test_what_needs_itself_is_refused_and_what_is_nested_deep() -> None:
    view = ["view", "<i8", ["tuple", 1], ["tuple", 8], 0]
    for nodes in (
        [[*view, reference(0)]],
        [[*view, reference(1)], [*view, reference(0)]],
        [["named", "core.scheduling.beams.beam_rules:Token", reference(0), None, 0]],
    ):
        assert "must be there before itself" in refused(nodes)
    deep: Any = 0
    for _ in range(9):
        deep = ["tuple", deep]
    assert "of more than 8 levels" in refused([["list", deep]])
    assert "no engine's state" in refused([["list", deep[1]]])
    raw = b"\x92\x91" + b"\x91" * 500_000 + b"\xc0\xc0"
    with pytest.raises(CaptureFileError, match="RecursionError"):
        restore.restore(zlib.compress(raw))


def test_a_long_chain_is_restored_without_recursion_and_is_no_key() -> None:
    """The hash of a key would be a recursion in C, which nothing bounds."""
    offers = [["array", "<i4", [1], bytes(4)], ["array", "<f4", [1], bytes(4)]]
    candidates = ["named", "core.scheduling.beams.beam_rules:Candidates", reference(0), reference(1)]
    length = 20_000
    links = [
        ["named", "core.scheduling.beams.beam_rules:Token", reference(4 + k), reference(2), 0] for k in range(length)
    ]
    links[-1][2] = None
    message = refused([*offers, candidates, *links, ["dict", False, reference(3), 1]])
    assert "a key of the kind Token" in message


def test_arrays_are_of_numbers_and_views_stay_within_them() -> None:
    for dtype in ("|O", "|V8", "<U4", "M8[ns]", "<c16", "i8,O", "<f2", "", "\0"):
        assert "unknown dtype" in refused([["array", dtype, [1], bytes(8)]])
    for shape in ([2], [1 << 40], [-2, -1], [1, 1, 1, 1, 1], [0]):
        refused([["array", "<i8", shape, bytes(8)]])
    base = ["array", "<i8", [4], bytes(32)]
    for shape, strides, offset in (
        ([5], [8], 0),
        ([1 << 40], [0], 0),
        ([4], [8], 8),
        ([1], [8], -8),
        ([1], [8], 32),
        ([2], [-8], 0),
        ([2], [1 << 62], 0),
        ([2, 2], [16, 16], 0),
        ([-1], [8], 0),
        ([2], [8, 8], 0),
        ([4], [16], 0),
        ([True], [8], 0),
        (["1"], [8], 0),
    ):
        view = ["view", "<i8", ["tuple", *shape], ["tuple", *strides], offset, reference(0)]
        message = refused([base, view], reference(1))
        assert "view" in message, (shape, strides, offset, message)
    for owner in (None, reference(1), 5):
        refused([["list", 1], ["set"], ["view", "<u1", ["tuple", 1 << 40], ["tuple", 1], 0, owner]])
    good = ["view", "<i8", ["tuple", 2], ["tuple", -16], 24, reference(0)]
    assert "root" in refused([base, good], reference(1))


def test_what_unpacks_to_more_than_it_may_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nils, empty lists, maps and texts take a byte each in the file, and up to 64 as objects."""
    nils = zlib.compress(b"\x92\x91\xdd" + (8 << 20).to_bytes(4, "big") + bytes([0xC0]) * (8 << 20) + b"\xc0", 9)
    with pytest.raises(CaptureFileError, match=f"of more than {(1 << 20) + 256 * len(nils)} bytes"):
        restore.restore(nils)
    many = msgspec.msgpack.encode([[[["list"]] * 33], reference(0)])
    with pytest.raises(CaptureFileError, match="of length <= 32"):
        restore.restore(zlib.compress(many))
    monkeypatch.setattr(restore, "MAX_NODE_BYTES", 1000)
    assert "an object of more than 1000 bytes" in refused([["list", *[None] * 1000]])
    monkeypatch.setattr(restore, "MAX_OBJECT_BYTES", 5000)
    assert "objects of more than 5000 bytes" in refused([["list", *[None] * 900]] * 6)
    assert "no engine's state" in refused([["array", "<i8", [900], bytes(7200)]])  # arrays count as their bytes
    for empty, kind in (([], "an unknown kind"), ({}, "the unknown kind dict")):
        assert f"a value of {kind}" in refused([["list", empty]])


def test_roots_references_and_extensions_that_are_none(sound: tuple[list[Any], Any]) -> None:
    nodes, _ = sound
    for root in (reference(1), reference(place_of(nodes, "array"))):
        assert "no engine's state" in refused(nodes, root)
    assert "a missing object" in refused(nodes, reference(len(nodes)))
    assert "a missing object" in refused(nodes, msgspec.msgpack.Ext(REFERENCE + 1, b"\0\0\0\0"))
    for root in (None, 5, ["list"]):
        with pytest.raises(CaptureFileError, match="cannot read"):
            restore.restore(pack(nodes, root))
    scheduler = place_of(nodes, "object", "core.scheduling.scheduler:Scheduler")
    assert "instead of" in refused([["list", 1, reference(scheduler), 2, 3], *nodes[1:]])


def test_each_field_has_a_value_of_its_type(sound: tuple[list[Any], Any]) -> None:
    nodes, _ = sound
    array = reference(place_of(nodes, "array"))
    for name, field, value in (
        ("core.scheduling.scheduler:Scheduler", "block_size", "16"),
        ("core.scheduling.scheduler:Scheduler", "block_size", True),
        ("core.scheduling.scheduler:Scheduler", "takes_turns", 1),
        ("core.scheduling.scheduler:Scheduler", "waiting", None),
        ("core.scheduling.scheduler:Scheduler", "policy", array),
        ("core.scheduling.preemption:Preemption", "_mode", "other"),
        ("core.kv.block_pool:BlockPool", "ref_count", ["array", "<i8", bytes(8)]),
        ("core.kv.block_names:BlockNames", "_tokens", ["array", "<i4", bytes(8)]),
        ("core.batch.request:Request", "serial", 0.5),
        ("core.batch.request:Request", "params", None),
        ("core.batch.request:Request", "block_hashes", ["list", "a"]),
        ("core.batch.table:BatchTable", "request", ["list", 1]),
    ):
        assert "instead of" in refused(*with_field(sound, name, field, value)), (name, field)
    inside = ["dict", False, 1, ["list", "text"]]
    events = ("core.scheduling.outputs:RequestEventLog", "_events")
    assert "a checkpoint with list instead of" in refused(*with_field(sound, *events, reference(len(nodes)), inside))


def test_columns_that_are_not_the_tables_are_refused(sound: tuple[list[Any], Any]) -> None:
    nodes, _ = sound
    table = ("core.batch.table:BatchTable", "_blocks")
    small = ["array", "<i8", [1, 4], bytes(32)]
    blocks = ["list", reference(len(nodes) + 1)]
    assert "BatchTable with the blocks" in refused(*with_field(sound, *table, reference(len(nodes)), blocks, small))


def test_a_state_whose_numbers_do_not_agree_is_refused(sound: tuple[list[Any], Any]) -> None:
    pool = ("core.kv.block_pool:BlockPool", "num_free")
    assert "a state that no engine can have had" in refused(*with_field(sound, *pool, 3))
    pages = ("core.kv.block_pool:BlockPool", "page_blocks")
    assert "no engine can have had: FloatingPointError" in refused(*with_field(sound, *pages, 0))  # divides by it


def run_mutations(seed: int, count: int) -> tuple[int, int]:
    """Run so many of a seed's mutations under an audit hook, in a process of their own."""
    command = [sys.executable, "-W", "error", "-m", "tests.core.capture.hostile_checkpoints", str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_refused, num_failed = ast.literal_eval(done.stdout)
    return num_refused, num_failed


def test_no_mutation_makes_python_do_anything_but_compute() -> None:
    num_refused, num_failed = run_mutations(seed=1, count=300)
    assert 200 < num_refused < 295
    assert num_failed < 10


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 100 + int(os.environ.get("SOAK_HOSTILE_CHECKPOINTS", "20"))))
def test_many_mutations_make_python_do_nothing_but_compute(seed: int) -> None:
    num_refused, num_failed = run_mutations(seed, count=5000)
    assert 3500 < num_refused < 4900
    assert num_failed < 100


def compute_for_ever() -> None:
    with untrusted_file("a.cap"):
        while True:
            pass


def test_what_a_file_decides_is_bounded_in_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_SECONDS", 0.1)
    with pytest.raises(CaptureFileError, match=r"a\.cap: no engine can have written it: TooLongError"):
        compute_for_ever()
    with pytest.raises(CaptureFileError, match="IndexError"), untrusted_file("a.cap"):
        raise IndexError
    with pytest.raises(ConfigError), untrusted_file("a.cap"):
        raise ConfigError("as it is")
    monkeypatch.setattr(bounds, "MOST_BYTES", 1 << 30)
    with (
        pytest.raises(CaptureFileError, match=r"a\.cap: its options or its state take more than"),
        bounded_memory("a.cap"),
    ):
        np.empty(2 << 30, np.uint8)
    np.empty(2 << 30, np.uint8)
