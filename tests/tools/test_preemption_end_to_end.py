"""Preemption through LLM and through a daemon: engine processes whose tiny model has too few blocks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Statistics
from tests.tools.test_cli import serving
from tools.lab.bench.tiny_model import VOCAB_SIZE, write_tiny_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 96, "block_size": 8, "max_num_seqs": 6}
PRESSED = {"num_blocks_override": 14, "num_swap_blocks": 12}


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def calm(model: Path) -> list[list[int]]:
    with LLM(model=model, skip_tokenizer_init=True, **OPTIONS) as llm:
        tokens, statistics = answers(llm)
    assert statistics.num_preemptions == 0
    return tokens


def answers(llm: LLM) -> tuple[list[list[int]], Statistics]:
    """Tokens of seven requests, every other sampled, and the statistics afterwards."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB_SIZE, 8 + 5 * number).tolist() for number in range(7)]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=number % 2 * 0.8, seed=number) for number in range(7)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], llm.statistics()


def test_llm_swaps_and_gives_the_same_tokens(model: Path, calm: list[list[int]]) -> None:
    options = {**OPTIONS, **PRESSED, "enable_prefix_caching": False}
    with LLM(model=model, skip_tokenizer_init=True, preemption_mode="swap", **options) as llm:
        tokens, statistics = answers(llm)
    assert tokens == calm
    assert statistics.num_preemptions > 0
    assert statistics.num_swapped_in_blocks > 0


def test_a_daemon_measures_its_costs_and_gives_the_same_tokens(
    model: Path, calm: list[list[int]], tmp_path: Path
) -> None:
    options = {"executor": "local", "model": model, **OPTIONS, **PRESSED, "preemption_mode": "auto"}
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    with (
        serving(f"ipc://{tmp_path}/socket", *flags, "--scheduling-policy", "fair") as (_, address),
        LLM(connect=address, skip_tokenizer_init=True) as llm,
    ):
        tokens, statistics = answers(llm)
    assert tokens == calm
    assert statistics.num_preemptions > 0
