"""`engine-core eval-check`: one result at any batch size and under faults, and a result that differs is shown."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.programs.__main__ import write_model
from tools.cli import main
from tools.lab import eval_check
from tools.lab.eval_check import EXIT_DIFFERS, EXIT_NOT_PROVED, EXIT_SAME, Run, Sample, encode, scores
from tools.lab.eval_tasks import TASKS


@pytest.fixture(name="model", scope="module")
def a_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return str(folder)


def check(model: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    """-> exit status, what --json printed."""
    status = main(["eval-check", model, "--threads", "1", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def test_each_mode_has_the_same_result(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = check(model, capsys, "--batch-sizes", "8", "-o", str(tmp_path / "result"))
    assert (status, len(found["hashes"]), found["difference"]) == (EXIT_SAME, 1, ""), found
    counts = {run["mode"]: run["count"] for run in found["runs"]}
    assert counts["plain"] == 0
    assert counts["speculation"] > 10
    assert counts["preempted"] > 0
    assert counts["killed"] == 1
    result = (tmp_path / "result").read_bytes()
    assert scores(result) == {name: tuple(pair) for name, pair in found["scores"].items()}
    samples = [json.loads(line) for line in result.splitlines()]
    assert [sample["task"] for sample in samples].count("copies") == 6
    assert all(sample["sum"] < 0 or sample["text"] for sample in samples if sample["task"] != "copies")
    assert not list(tmp_path.glob("result.*"))


def test_a_running_engine_has_it_among_its_other_requests(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, alone = check(model, capsys, "--batch-sizes", "8", "--modes", "plain")
    config = EngineConfig(model=model, threads=1, max_model_len=2048)
    with EngineProcess(config) as engine, LLM(connect=engine.address) as llm, ThreadPoolExecutor(1) as other:
        params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=1)
        stream = other.submit(llm.generate, [[5, 6]] * 4, params, use_tqdm=False)
        words = "--connect", engine.address, "--batch-sizes", "1", "--json"
        assert main(["eval-check", *words]) == EXIT_SAME
        assert json.loads(capsys.readouterr().out)["hashes"] == alone["hashes"]
        assert len(stream.result()) == 4
        with pytest.raises(SystemExit):
            main(["eval-check", *words, "--modes", "killed"])
        assert main(["eval-check", *words, "--threads", "1"]) == 1
    assert "leave out --threads" in capsys.readouterr().err


@pytest.mark.soak
def test_twelve_configurations(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = check(model, capsys)
    assert (status, len(found["runs"]), len(found["hashes"])) == (EXIT_SAME, 12, 1), found


def _samples(**changed: Any) -> bytes:
    """A result in which the first of several choices is the likeliest; `changed`: of the first sample."""
    samples = []
    for task in TASKS:
        for number, document in enumerate(task.documents):
            is_text = task.form == "generate_until"
            for place in range(len(document.choices) or 1):
                total = None if is_text else -1.0 - place
                text = str(document.answer) if is_text else None
                samples.append(Sample(task.name, number, total, None if is_text else number % 2 == 0, text))
    return encode([msgspec.structs.replace(samples[0], **changed), *samples[1:]])


def test_a_result_that_differs_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(mode: str, batch_size: int, options: Any) -> tuple[Run, bytes]:
        result = _samples(sum=-1.0 - batch_size / 64)
        return Run(mode, batch_size, f"hash {batch_size}", 0.5, 1), result

    monkeypatch.setattr(eval_check, "evaluate", evaluate)
    options = "--modes", "plain", "--batch-sizes", "1", "8", "-o", str(tmp_path / "result")
    assert main(["eval-check", *options]) == EXIT_DIFFERS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mode", "batch", "seconds", "sha256", "of", "the", "result"]
    assert lines[1].split() == ["plain", "1", "0.5", "hash", "1"]
    assert lines[-1] == "2 configurations, 2 results: hash 1, hash 8"
    shown = '{"task":"sums","document":0,"sum":%s,"is_greedy":true,"text":null}'
    assert lines[-2] == f"the first difference: {shown % '-1.015625'} and {shown % '-1.125'}"
    assert (tmp_path / "result").read_bytes() != (tmp_path / "result.2").read_bytes()


def test_a_configuration_without_its_subject_proves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_check, "evaluate", lambda *given: (Run(given[0], given[1], "h", 0.5, 0), _samples()))
    assert main(["eval-check", "--modes", "killed", "--batch-sizes", "8"]) == EXIT_NOT_PROVED
    assert "nothing is proved by killed at batch size 8: there was none" in capsys.readouterr().out
    assert main(["eval-check", "--modes", "plain", "--batch-sizes", "8"]) == EXIT_SAME
    with pytest.raises(SystemExit):
        main(["eval-check", "--batch-sizes", "0"])


def test_scores() -> None:
    found = scores(_samples())
    num_first = sum(document.answer == 0 for document in TASKS[0].documents)
    assert found["sums"] == ("acc", num_first / len(TASKS[0].documents))
    assert found["capitals"] == ("acc", 1.0)
    assert found["last_word"] == ("acc", 0.5)
    num_words = sum(len(str(document.answer).split()) for document in TASKS[3].documents)
    assert found["texts"] == ("word_perplexity", pytest.approx(2.718281828459045 ** (4 / num_words)))
    assert found["copies"] == ("exact_match", 1.0)


def test_the_tasks_for_lm_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval-check", "--write-tasks", str(tmp_path)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.stem for path in paths] == [task.name for task in TASKS]
    for path, task in zip(paths, TASKS, strict=True):
        form = json.loads(path.read_text())
        rows = [
            json.loads(line) for line in Path(form["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        ]
        assert [(row["text"], row["answer"]) for row in rows] == [document[:2] for document in task.documents]
        assert (form["task"], form["output_type"]) == (f"engine_core_{task.name}", task.form)
