"""`engine-core prove`: each phase tests its subject, or says that it did not."""

import pytest

from tools.lab.bench.tiny_model import write_tiny_model
from tools.lab.prove import main


@pytest.fixture(name="model", scope="module")
def a_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return str(folder)


def test_few_prompts_and_a_long_context(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "--prompts", "8", "--max-model-len", "512", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "preempted: 8/8 identical bits" in text
    assert " 0 preemptions" not in text
    assert "every token and every log probability is the same" in text


def test_a_phase_without_its_subject_proves_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "--prompts", "1", "--threads", "1"]) == 1
    assert "nothing is proved about preempted requests, because there were none" in capsys.readouterr().out
