"""Crafted captures with right checksums: `replay`, `replay redact` and `explain --at` refuse them, and run nothing."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.capture.bounds import TooLongError
from core.capture.file import CaptureFile
from core.capture.records import TAGS, Checkpoint, Header, Step, encode_record
from core.capture.state_classes import FIELDS, OBJECTS
from core.scheduling.scheduler import Scheduler
from ipc.records.log_frames import pack_frame
from tests.captures import capture_in_process
from tests.core.capture.hostile_checkpoints import pack, reference, snapshot_of, unpack
from tools.cli import main


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, Step]:
    """The header and the first step of a sound capture."""
    path = tmp_path_factory.mktemp("sound") / "a.cap"
    capture_in_process(path)
    file = CaptureFile(path)
    return file.header, next(turn.step for turn in file.turns())


def write(path: Path, parts: tuple[Header, Step], state: bytes) -> Path:
    header, step = parts
    records: list[Any] = [header, Checkpoint(5, 5, state), step]
    path.write_bytes(
        b"".join(pack_frame(place, TAGS[type(one)], encode_record(one)) for place, one in enumerate(records))
    )
    return path


def run_all(path: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Run all commands that restore checkpoints; return what each said."""
    said = []
    for command in (["replay", str(path)], ["replay", "redact", str(path), f"{path}-out"], ["explain", "--at", "5"]):
        status = main([*command, str(path)] if command[0] == "explain" else command)
        assert status in (1, 4)
        said.append(capfd.readouterr().err)
        assert said[-1].startswith("engine-core: error:")
    assert not Path(f"{path}-out").exists()
    return said


def chain(value: Any, *names: str) -> Any:
    """Return the value of an attribute of an attribute, as methods were named once."""
    for name in names:
        value = ["method", value, name]
    return value


def test_no_attribute_of_an_array_leads_to_a_function(
    tmp_path: Path, parts: tuple[Header, Step], capfd: pytest.CaptureFixture[str]
) -> None:
    """Once an array of NumPy led to os.system, a batch's method was set to it, and set_parts() called that."""
    nodes = [
        ["array", "<i8", [1], bytes(8)],
        ["object", "core.batch.batch:Batch", chain(reference(0), "ctypes", "_ctypes", "_os", "system")],
        ["object", "ipc.tables.columns:Columns", ["method", reference(1), "num_promised_blocks"]],
    ]
    for text in run_all(write(tmp_path / "a.cap", parts, pack(nodes, reference(2))), capfd):
        assert "names 'ipc.tables.columns:Columns', which is not part of an engine's state" in text
    nodes[2] = ["list", reference(1)]
    for text in run_all(write(tmp_path / "a.cap", parts, pack(nodes, reference(2))), capfd):
        assert "the method ctypes of ndarray" in text


def test_a_state_that_no_engine_reaches_is_an_error_in_each_command(
    tmp_path: Path,
    parts: tuple[Header, Step],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of right types, and with numbers that do not agree: refused, or ended after its time."""
    nodes, root = unpack(snapshot_of())
    place = next(place for place, node in enumerate(nodes) if node[:2] == ["object", "core.kv.block_ring:BlockRing"])
    ring = list(nodes[place])
    ring[2 + list(FIELDS[OBJECTS["core.kv.block_ring:BlockRing"]]).index("_length")] += 1
    crafted = pack([*nodes[:place], ring, *nodes[place + 1 :]], root)
    for text in run_all(write(tmp_path / "a.cap", parts, crafted), capfd):
        assert "a state that no engine can have had" in text

    def check_for_ever(self: Scheduler) -> None:
        raise TooLongError("it took more than 60 s of CPU time")

    monkeypatch.setattr(Scheduler, "check_integrity", check_for_ever)
    for text in run_all(write(tmp_path / "a.cap", parts, pack(nodes, root)), capfd):
        assert "no engine can have written it: TooLongError: it took more than 60 s" in text


def test_options_that_take_too_much_memory_are_refused(
    tmp_path: Path, parts: tuple[Header, Step], capfd: pytest.CaptureFixture[str]
) -> None:
    header, step = parts
    config = msgspec.msgpack.decode(header.config)
    config["num_blocks_override"] = 1 << 30
    header = msgspec.structs.replace(header, config=msgspec.Raw(msgspec.msgpack.encode(config)))
    for text in run_all(write(tmp_path / "a.cap", (header, step), snapshot_of(searches=False)), capfd):
        assert "MemoryError" in text
