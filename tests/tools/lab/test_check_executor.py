"""`engine-core check-executor`: good executors pass, each planted fault fails the check that it belongs to."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from core.execution.executor import FinishedStep
from core.execution.plan import NO_TOKEN, ModelRunnerOutput, SchedulerOutput
from core.executors.fake import FakeExecutor
from core.executors.local import LocalExecutor
from ipc.options.config import EngineConfig
from tests.fake_options import fake_options
from tools.cli import main
from tools.lab.bench.tiny_model import write_tiny_model
from tools.lab.check_executor.__main__ import Finding, check_executor

NUM_REQUESTS = 24
Fault = Callable[[SchedulerOutput, ModelRunnerOutput], dict[str, object]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return str(folder)


def test_the_fake_executor_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-executor", "fake", "--requests", str(NUM_REQUESTS)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith("    ok  ") for line in lines)
    assert [line.split(":")[0].split("ok  ")[1] for line in lines] == [
        "facts",
        "alone",
        "together",
        "aborted",
        "in chunks",
        "preempted",
        "swapped",
        "cached",
        "two steps at once",
    ]
    assert last == "executor fake: every check passed"


def test_a_model_passes_and_is_really_preempted_swapped_and_cached(model: str) -> None:
    findings = {one.name: one for one in check_executor(EngineConfig(model=model, threads=1), NUM_REQUESTS)}
    assert all(finding.is_right for finding in findings.values()), findings
    assert " 0 preemptions" not in findings["preempted"].text
    assert " 0 preemptions" not in findings["swapped"].text
    assert ", 0 tokens found" not in findings["cached"].text


def test_copies_that_are_not_made_fail(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = LocalExecutor.execute

    def forget(self: LocalExecutor, plan: SchedulerOutput) -> FinishedStep:
        empty = np.zeros(0, np.int32)
        names = ("swapped_in_slots", "swapped_in_blocks")
        return execute(self, msgspec.structs.replace(plan, **dict.fromkeys(names, empty)))  # type: ignore[return-value]

    monkeypatch.setattr(LocalExecutor, "execute", forget)
    findings = check_executor(EngineConfig(model=model, threads=1), NUM_REQUESTS)
    assert [one.name for one in findings if one.is_right is False] == ["swapped"]


def beside_others(plan: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, object]:
    tokens = output.token_ids
    return {"token_ids": np.where(tokens < 0, tokens, (tokens + len(plan.rows)) % 100).astype(np.int32)}


def raised(plan: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, object]:
    tokens = output.token_ids
    return {"token_ids": np.where(tokens < 0, tokens, (tokens + 1) % 100).astype(np.int32)}


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "neighbours": (beside_others, "together", "requests bit-identical to alone"),
    "another step": (
        lambda plan, output: {"step": output.step + 1},
        "outputs",
        "the output of step 0 has step number 1",
    ),
    "a wide column": (
        lambda plan, output: {"token_ids": output.token_ids.astype(np.int64)},
        "outputs",
        "token_ids is not a column of int32",
    ),
    "a token too many": (
        lambda plan, output: {"token_ids": np.append(output.token_ids, np.int32(1))},
        "outputs",
        "2 token ids, 1 expected",
    ),
    "an unknown token": (
        lambda plan, output: {"token_ids": np.maximum(output.token_ids, 5000)},
        "outputs",
        "token ids beyond -2 and the 100 of the vocabulary",
    ),
    "silence": (
        lambda plan, output: {"token_ids": np.full(len(plan.rows), NO_TOKEN, np.int32)},
        "outputs",
        "got no token in 200 steps",
    ),
    "no log probabilities": (lambda plan, output: {"logprobs": None}, "alone", "0 log probabilities, "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, check, text = FAULTS[name]
    findings = list(
        check_executor(EngineConfig(executor="fake", executor_options=fake_options(vocab_size=100)), NUM_REQUESTS)
    )
    assert all(finding.is_right for finding in findings), findings
    break_fake(monkeypatch, change)
    findings = list(
        check_executor(EngineConfig(executor="fake", executor_options=fake_options(vocab_size=100)), NUM_REQUESTS)
    )
    first = next(one for one in findings if one.is_right is False)
    assert first.name == check
    assert text in first.text


def test_tokens_that_the_executor_forgets_fail_when_it_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It yields other tokens than those that it goes on from, which shows when a row is told to it anew."""
    break_fake(monkeypatch, raised)
    findings = check_executor(
        EngineConfig(executor="fake", executor_options=fake_options(vocab_size=100)), NUM_REQUESTS
    )
    assert {one.name for one in findings if one.is_right is False} == {"preempted", "swapped"}


def break_fake(monkeypatch: pytest.MonkeyPatch, change: Fault) -> None:
    execute = FakeExecutor.execute

    def broken(self: FakeExecutor, plan: SchedulerOutput) -> FinishedStep:
        output = execute(self, plan).result()
        return FinishedStep(msgspec.structs.replace(output, **change(plan, output)))

    monkeypatch.setattr(FakeExecutor, "execute", broken)


def test_without_the_promise_a_difference_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    break_fake(monkeypatch, beside_others)
    make = FakeExecutor.__init__

    def modest(self: FakeExecutor, config: EngineConfig) -> None:
        make(self, config)
        self.info = msgspec.structs.replace(self.info, numerics="L0")

    monkeypatch.setattr(FakeExecutor, "__init__", modest)
    findings = list(
        check_executor(EngineConfig(executor="fake", executor_options=fake_options(vocab_size=100)), NUM_REQUESTS)
    )
    assert {one.is_right for one in findings if one.name in ("together", "preempted")} == {None}
    assert not [one for one in findings if one.is_right is False]


def test_what_an_executor_says_of_itself_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    make = FakeExecutor.__init__

    def boastful(self: FakeExecutor, config: EngineConfig) -> None:
        make(self, config)
        self.info = msgspec.structs.replace(self.info, numerics="L9", fingerprint="", eos_token_ids=(-1,))

    monkeypatch.setattr(FakeExecutor, "__init__", boastful)
    monkeypatch.setattr(FakeExecutor, "determine_num_available_blocks", lambda self, memory_bytes, block_size: 9)
    first = next(check_executor(EngineConfig(executor="fake"), NUM_REQUESTS))
    assert first == Finding(
        "facts",
        False,
        "no fingerprint; numerics 'L9' is not one of L0, L1, L2; end tokens (-1,) beyond the vocabulary of 32000; "
        "9 blocks of 16 tokens fit 1 GiB, 9 fit 4 GiB, 9 of 32 tokens fit 1 GiB",
    )
