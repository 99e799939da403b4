"""Captures of the same workload on three engines, made once."""

from pathlib import Path

import msgspec
import pytest

from ipc.options.speculation import SpeculativeConfig
from tests.captures import (
    CONFIG,
    capture_in_process,
)
from tests.fake_options import fake_options, with_options
from tools.commands.replay.what_if import report
from tools.lab.bench.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The workload of tests/captures.py on the fake executor, at both depths and with several tokens of a request in a
    step, and on a tiny real model; and with speculation."""
    folder = tmp_path_factory.mktemp("captures")
    write_tiny_model(folder / "model")
    drafts = SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3, step_ns=(10**6,) * 8)
    configs = {
        "fake": CONFIG,
        "deep": msgspec.structs.replace(CONFIG, async_scheduling=True),
        "several": with_options(CONFIG, executor_options=fake_options(tokens_per_step=5)),
        "deep-several": with_options(CONFIG, executor_options=fake_options(tokens_per_step=5), async_scheduling=True),
        "real": msgspec.structs.replace(
            CONFIG,
            executor="local",
            executor_options={},
            model=str(folder / "model"),
            dtype="float32",
            threads=1,
        ),
    }
    free = msgspec.structs.replace(
        drafts, step_ns=()
    )  # guesses of such texts never make up for the turns that they lose
    for name, settings in (("deep", free), ("real", drafts)):
        configs[f"{name}-drafts"] = msgspec.structs.replace(configs[name], speculative_config=settings)
    model = SpeculativeConfig(method="draft_model", model=str(folder / "model"), step_ns=(10**6,) * 8)
    configs["real-draft-model"] = msgspec.structs.replace(configs["real"], speculative_config=model)
    for name, config in configs.items():
        capture_in_process(folder / name, config)
    return {"model": folder / "model", **{name: folder / name for name in configs}}


@pytest.fixture(autouse=True)
def few_spread_runs(monkeypatch: pytest.MonkeyPatch) -> int:
    """What-ifs find their error bars in two runs. Return the number of users' runs, which took most of each test."""
    before = report.NUM_SPREAD_RUNS
    monkeypatch.setattr(report, "NUM_SPREAD_RUNS", 2)
    return before


@pytest.fixture
def copy(captures: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "copy.cap"
    path.write_bytes(captures["fake"].read_bytes())
    return path
