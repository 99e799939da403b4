"""The fake executor's own options: texts in executor_options, each checked, all of them in docs/executors.md."""

from pathlib import Path

import pytest

from core.executors.by_name import load_executor
from core.executors.fake_options import FAKE_OPTIONS, FakeOptions, read_fake_options, with_fake_options
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.step_sizes import with_rows
from tools.commands.replay.what_if.oracle_executor import OracleExecutor


def test_they_are_read_from_texts() -> None:
    options = {"vocab_size": "50", "eos_token_id": "3", "step_us": "0", "poison": "row:7:1"}
    config = EngineConfig(executor="fake", executor_options=options)
    assert read_fake_options(config) == FakeOptions(vocab_size=50, eos_token_id=3, poison="row:7:1")
    changed = with_fake_options(config, vocab_size=60, poison="")
    assert read_fake_options(changed) == FakeOptions(vocab_size=60, eos_token_id=3)
    assert load_executor(changed).info.vocab_size == 60


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"vocab": "9"}, "has no option 'vocab'; it has vocab_size, eos_token_id, max_model_len, tokens_per_step,"),
        ({"vocab_size": "3"}, "vocab_size must be an integer from 4 to 16777216; got 3"),
        ({"vocab_size": "9" * 20}, "vocab_size must be an integer from 4 to 16777216; got '99999"),
        ({"vocab_size": "many"}, "vocab_size must be an integer from 4 to 16777216; got 'many'"),
        ({"step_us": "-1"}, "step_us must be an integer from 0 to 1000000000; got -1"),
        ({"tokens_per_step": ""}, "tokens_per_step must be an integer from 1 to 256; got ''"),
        (
            {"poison": "cough:1:2"},
            "poison must be KIND:TOKEN:POSITION, KIND one of raise, row, memory, abort, segv, hang;",
        ),
        ({"poison": "row:1"}, "got 'row:1'"),
    ],
)
def test_a_bad_one_is_refused_by_name(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_executor(EngineConfig(executor="fake", executor_options=options))
    assert "executor 'fake'" in str(refused.value)
    assert text in str(refused.value)


def test_they_are_no_options_of_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"fake_vocab_size is an option of the fake executor: .*{'vocab_size': '9'}"):
        config_from_options(executor="fake", fake_vocab_size=9)


def test_another_executor_s_options_are_not_read() -> None:
    """A replay runs captures of every executor on fake ones."""
    config = EngineConfig(executor="npu", executor_options={"vocab_size": "none"})
    assert read_fake_options(config) == FakeOptions()
    assert with_fake_options(config, vocab_size=9) is config
    info = load_executor(EngineConfig(executor="fake")).info
    assert OracleExecutor(with_rows(config), info, {}).info is info  # type: ignore[arg-type]


@pytest.mark.checkout
def test_the_page_has_each_of_them() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "executors.md").read_text()
    rows = [f"| `{name}` | {_values(name)} | {declared.option.help}" for name, declared in FAKE_OPTIONS.items()]
    assert [row for row in rows if row not in page] == []


def _values(name: str) -> str:
    return "text" if FAKE_OPTIONS[name].plain is str else f"integer {FAKE_OPTIONS[name].bounds}"
