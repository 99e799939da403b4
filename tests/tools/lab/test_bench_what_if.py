"""`engine-core bench what-if`: its records, of runs under a clock that obeys a law."""

from pathlib import Path

import msgspec

from core.capture.file import CaptureFile
from tests.captures import CONFIG
from tests.tools.commands.test_what_if import record, workload
from tools.commands.replay.what_if.options import changed
from tools.lab.bench.what_if import CHANGES, make_arrivals, records


def test_what_was_foretold_stands_beside_what_happened(tmp_path: Path) -> None:
    base = msgspec.structs.replace(CONFIG, max_num_seqs=16)
    paths = [tmp_path / f"{number}.cap" for number in range(2 + len(CHANGES))]
    for path, change in zip(paths, ({}, {}, *CHANGES), strict=True):
        record(path, changed(base, change), workload(80))
    same, *others = records([CaptureFile(path) for path in paths], {"rep": 0})
    assert same["change"] == {}
    assert same["holds"]
    assert all(one["again_percent"] == 0 for one in same["figures"].values()), "two runs that are equal"
    assert [one["change"] for one in others] == list(CHANGES)
    for one in others:
        assert one["holds"], one
        for figure in one["figures"].values():
            assert abs(figure["error_percent"]) < 3, one
    fewer_rows = others[0]["figures"]["ttft_mean_ms"]
    assert fewer_rows["real"] > 1.1 * same["figures"]["ttft_mean_ms"]["real"], "the change changes nothing"
    # A run that did not go as foretold is seen.
    wrong = [CaptureFile(path) for path in (*paths[:2], *paths[3:], paths[2])]
    assert not all(one["holds"] for one in records(wrong, {}))


def test_the_load_is_the_same_each_time_and_has_its_shape() -> None:
    first, again, other = make_arrivals(200, 0), make_arrivals(200, 0), make_arrivals(200, 1)
    assert first == again != other
    assert 0.8 < first[-1].after_s / 200 < 1.25
    begins = [tuple(one.prompt[:8]) for one in first]
    most = max(map(begins.count, begins))
    assert 50 < most < 90, "about a third of the prompts begin alike"
    assert {one.priority for one in first} == {0, 1}
