"""A model like Gemma 3 end to end: its tokens do not depend on whether layers with a window give KV blocks back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.core.executors.test_window_pages import SETTINGS
from tools.commands.replay.__main__ import main


def tokens(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of all choices, and the most bytes of blocks in use."""
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    settings = {**SETTINGS, "vocab_size": 512, "num_hidden_layers": len(kinds), "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(3)
    prompts = [{"prompt_token_ids": rng.integers(2, 500, count).tolist()} for count in (700, 30, 300)]
    given = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 1024}
    with LLM(model=str(folder), max_num_seqs=4, threads=1, **given, **options) as llm:
        params = [
            {"max_tokens": 40},
            {"max_tokens": 6, "n": 3},
            {"max_tokens": 4, "use_beam_search": True, "best_of": 2},
        ]
        outputs = []
        for one in params:
            sampling = SamplingParams(temperature=0.0 if "best_of" in one else 0.7, seed=3, ignore_eos=True, **one)
            outputs += llm.generate(prompts, sampling, use_tqdm=False)
        used = llm.statistics().max_used_blocks
    return [choice.token_ids for output in outputs for choice in output.outputs], used


@pytest.mark.timeout(120)
def test_tokens_are_those_of_a_run_that_keeps_all_blocks(tmp_path: Path) -> None:
    expected, all_blocks = tokens(tmp_path, kv_window=0)
    capture = tmp_path / "a.cap"
    got, pages = tokens(tmp_path, capture=str(capture))
    assert got == expected
    assert pages * 6 < all_blocks * 7  # layers of a page, and of a block
    assert main([str(capture)]) == 0
    assert main([str(capture), "--mode", "full"]) == 0
    assert tokens(tmp_path, pipeline_parallel_size=2)[0] == expected
