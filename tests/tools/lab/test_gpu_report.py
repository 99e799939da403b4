"""The report of a GPU that is there for minutes: order, time left, and what a kill at any byte loses."""

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.triton.self_test import factors, tile_digests
from tests.kernels.triton.tensor_core import AMPERE, HOPPER, product
from tests.placed import PREFIX
from tests.triton_device import ANYWHERE, DEVICE, ON_GPU
from tools.lab.bench.gpu.report import EMULATED, Item, Report, items

pytestmark = ANYWHERE


class Clock:
    """Tells the time, which only items take."""

    def __init__(self) -> None:
        self.now, self.ran = 0.0, list[str]()

    def __call__(self) -> float:
        return self.now

    def item(self, name: str, seconds: float, priority: int = 0, fails: type[BaseException] | None = None) -> Item:
        def run() -> dict[str, object]:
            self.ran.append(name)
            self.now += seconds
            if fails is not None:
                raise fails("as planned")
            return {"value": name}

        return Item(name, seconds, priority, run)


def read(folder: Path) -> list[str]:
    return [json.loads(line)["item"] for line in (folder / "gpu.jsonl").read_text().splitlines()]


def test_items_run_by_priority_while_there_is_time(tmp_path: Path) -> None:
    clock = Clock()
    given = [clock.item("c", 9, 3), clock.item("a", 5, 1), clock.item("b", 20, 2), clock.item("d", 1, 4)]
    assert Report(tmp_path, "1").run(given, 15, clock) == ["b"]
    assert clock.ran == read(tmp_path) == ["a", "c", "d"]
    assert Report(tmp_path, "1").run(given, 20, clock) == []
    assert clock.ran == ["a", "c", "d", "b"]
    carried = tmp_path / "gpu.jsonl"
    assert Report(tmp_path / "next", "1", carried).run(given, 99, clock) == []
    assert len(clock.ran) == 4
    Report(tmp_path / "next", "2", carried).run(given, 99, clock)
    assert clock.ran[4:] == ["a", "b", "c", "d"], "another tree is measured again"


def test_a_failure_and_a_kill_cost_their_item_alone(tmp_path: Path) -> None:
    clock = Clock()
    given = [clock.item("a", 1, 1), clock.item("b", 1, 2, ValueError), clock.item("c", 1, 3, KeyboardInterrupt)]
    with pytest.raises(KeyboardInterrupt):
        Report(tmp_path, "1").run(given, 99, clock)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(line["item"], line.get("error")) for line in lines] == [("a", None), ("b", "ValueError: as planned")]
    clock.ran.clear()
    Report(tmp_path, "1").run([*given[:2], clock.item("c", 1, 3)], 99, clock)
    assert clock.ran == ["b", "c"], "what failed runs again"


def test_a_kill_at_any_byte_loses_one_record(tmp_path: Path) -> None:
    clock = Clock()
    given = [clock.item(name, 1, index) for index, name in enumerate("abc")]
    Report(tmp_path, "1").run(given, 99, clock)
    whole = (tmp_path / "gpu.jsonl").read_bytes()
    for end in range(len(whole)):
        (tmp_path / "gpu.jsonl").write_bytes(whole[:end])
        clock.ran.clear()
        Report(tmp_path, "1").run(given, 99, clock)
        known = [json.loads(line)["item"] for line in whole[:end].split(b"\n") if line.endswith(b"}")]
        assert clock.ran == ["a", "b", "c"][len(known) :]
        assert Report(tmp_path, "1").known == {"a", "b", "c"}


def test_the_items_have_names_of_their_own() -> None:
    assert len({item.name for item in items()}) == len(items())
    assert sum(item.seconds for item in items() if "peer" not in item.name) <= 480, "in one go"


def test_a_part_of_the_report_is_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare this GPU's bits with goldens. Two GPUs are measured if there are two."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=len(commands), stdout="out", stderr="err")

    monkeypatch.setattr(f"{PREFIX}tools.lab.bench.gpu.report.subprocess.run", run)
    by_name = {item.name: item for item in items()}
    for number, name in enumerate(("goldens of the demo model", "ends of products"), 1):
        record = by_name[name].run()
        assert (record["status"], record["out"], record["err"]) == (number, "out", "err")
    for part in commands[0] + commands[1]:
        assert not part.startswith("tests/") or (Path(__file__).parents[3] / part).exists(), part
    assert commands[1][-2:] == ["-k", "activation"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert by_name["two GPUs"].run()["skipped"] == "the machine has one GPU"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert by_name["two GPUs"].run()["status"] == 3
    assert commands[-1][-2:] == ["--tensor-parallel-size", "2"]


def test_the_digests_are_those_of_the_emulation() -> None:
    """A device whose digest is among them has the arithmetic that CI computes."""
    x, weight = ((each.numpy().view(np.uint32) >> 16).astype(np.uint16) for each in factors())
    sums = np.zeros((len(weight), len(x)), np.float32)
    found = [zlib.crc32(product(weight, x.T, sums, core=core).T.tobytes()) for core in (HOPPER, AMPERE)]
    assert found == list(EMULATED.values())
    if not ON_GPU:
        assert set(tile_digests(DEVICE)) == {found[0]}
