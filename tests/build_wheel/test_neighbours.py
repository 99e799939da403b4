"""An installed wheel beside other people's packages of the names that the checkout's packages have."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.build_wheel.suite import environment
from tests.fake_tokens import fake_tokens
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(400)]  # the wheel's kernels are compiled

#: A user's program: its own modules, and ours.
PROGRAM = """
import json, sys
import core.thing, frontend, ipc, kernels, tools
from engine_core import LLM, SamplingParams

answers = []
for options in json.loads(sys.argv[1]):
    with LLM(**options, skip_tokenizer_init=True) as llm:
        prompt = {"prompt_token_ids": [11, 12, 13]}
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
print(json.dumps([answers, core.thing.NAME, frontend.NAME, ipc.NAME, tools.NAME, kernels.NAME]))
"""

FAKE = {"executor": "fake"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with packages of its own: core/ is a namespace folder, kernels is another distribution's."""
    for name in ("core/thing", "frontend/__init__", "ipc/__init__", "tools/__init__"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir()
        path.write_text("NAME = 'the user'\n")
    (tmp_path / "installed" / "kernels").mkdir(parents=True)
    (tmp_path / "installed" / "kernels" / "__init__.py").write_text("NAME = 'another distribution'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def run(project: Path, program: Path, *arguments: str) -> str:
    """What it printed. A folder on PYTHONPATH comes before site-packages, so it stands for a distribution there."""
    variables = {**environment(), "PYTHONPATH": str(project / "installed"), "CC": "no-such-compiler"}
    command = [str(program), *arguments]
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_user_has_packages_of_the_same_names(installed: Path, project: Path) -> None:
    """Engines start and answer, one with a model and the compiled kernels; the user's modules stay the user's."""
    write_tiny_model(project / "model")
    model = {"model": str(project / "model"), "cpu_kernels": "c", "kv_cache_memory_bytes": 1 << 24}
    (fake, real), *names = json.loads(run(project, installed / "python", "program.py", json.dumps([FAKE, model])))
    assert fake == fake_tokens([11, 12, 13], 5, 32_000)
    assert len(real) == 5
    assert names == ["the user"] * 4 + ["another distribution"]


def test_the_command_line_beside_them(installed: Path, project: Path) -> None:
    assert "generate" in run(project, installed / "engine-core", "--help")
    assert run(project, installed / "python", "-m", "engine_core", "--version").startswith("engine-core ")
    options = ["--executor", "fake", "--max-tokens", "3", "--json"]
    (request,) = json.loads(run(project, installed / "engine-core", "generate", *options, "7"))["requests"]
    assert request["token_ids"] == fake_tokens([7], 3, 32_000)
