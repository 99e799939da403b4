"""An engine process with --device cuda: under Triton's interpreter it gives the CPU's tokens.

Without a GPU it does not start and says why: tests/core/executors/test_cuda_refusals.py.
"""

from pathlib import Path
from typing import Any

import pytest

from engine_core import LLM, SamplingParams
from tools.lab.bench.tiny_model import write_tiny_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_blocks_override": 20, "max_num_seqs": 2}
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (2, 20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return str(folder)


def answers(model: str, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    with LLM(model=model, skip_tokenizer_init=True, **OPTIONS, **options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_the_engine_process_gives_the_tokens_of_the_cpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert answers(model, device="cuda", async_scheduling=True) == answers(model)
