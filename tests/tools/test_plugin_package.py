"""Plug-ins as their users have them: built, installed, served by name, captured, replayed and checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "examples" / "plugin_executor", ROOT / "examples" / "plugin_scheduler"]

pytestmark = pytest.mark.checkout  # it is built from the checkout's files

PROGRAM = """
import sys
from engine_core import LLM, SamplingParams
options = {"executor": "example", "executor_options": {"vocabulary": "500"}, "capture": sys.argv[1]}
with LLM(skip_tokenizer_init=True, scheduler_cls=sys.argv[2], **options) as llm:
    prompts = [{"prompt_token_ids": [1, 2, number]} for number in range(4)]
    answers = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False), use_tqdm=False)
    assert all(max(answer.outputs[0].token_ids) < 500 for answer in answers)
    print(llm.numerics, sum(len(answer.outputs[0].token_ids) for answer in answers))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has installed the packages."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), *map(str, PACKAGES)], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


def test_it_serves_and_its_capture_replays(environment: dict[str, str], tmp_path: Path) -> None:
    capture = str(tmp_path / "run.capture")
    answered = run(environment, "-c", PROGRAM, capture, "default")
    assert answered.stdout == "L2 80\n", answered.stderr
    replayed = run(environment, "-m", "engine_core", "replay", capture)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "0 differences" in replayed.stdout


def test_a_scheduler_serves_and_its_capture_replays(environment: dict[str, str], tmp_path: Path) -> None:
    capture = str(tmp_path / "run.capture")
    answered = run(environment, "-c", PROGRAM, capture, "shortest")
    assert answered.stdout == "L2 80\n", answered.stderr
    words = ("-m", "engine_core", "replay", capture)
    refused = run(environment, *words)
    assert refused.returncode == 5
    assert "it was captured with the scheduler 'shortest', and this is 'default'" in refused.stderr
    replayed = run(environment, *words, "--scheduler-cls", "shortest")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "0 differences" in replayed.stdout


def test_a_scheduler_passes_the_check(environment: dict[str, str]) -> None:
    checked = run(environment, "-m", "engine_core", "check-scheduler", "shortest", "--examples", "2")
    assert checked.stdout.endswith("scheduler shortest: every check passed\n"), checked.stdout + checked.stderr


def test_it_passes_the_check(environment: dict[str, str]) -> None:
    checked = run(environment, "-m", "engine_core", "check-executor", "example", "--requests", "12")
    assert checked.stdout.endswith("executor example: every check passed\n"), checked.stdout + checked.stderr


def test_its_own_options_are_its_own_to_check(environment: dict[str, str]) -> None:
    words = ("-m", "engine_core", "generate", "--device", "example", "--executor-option", "colour=red", "hello")
    refused = run(environment, *words)
    assert refused.returncode == 1
    assert refused.stderr == (
        "engine-core: error: executor 'example' has the option vocabulary=N; got {'colour': 'red'}\n"
    )
