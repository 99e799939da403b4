"""LLM with a KV cache in 8 bits: more blocks in the same memory, its own fingerprint, and a capture that replays."""

from pathlib import Path
from typing import Any

from engine_core import LLM, SamplingParams
from tools.commands.replay.__main__ import main as replay
from tools.lab.bench.tiny_model import write_tiny_model

SMALL: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "threads": 1}
SMALL |= {"skip_tokenizer_init": True, "max_num_seqs": 200}


def test_it_runs_and_its_capture_replays(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    capture, params = tmp_path / "run.cap", SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 40, 70)]
    found: dict[str, Any] = {}
    for value, options in (("auto", {}), ("int8", {"capture": str(capture)})):
        with LLM(str(tmp_path), **SMALL, kv_cache_dtype=value, **options) as llm:
            together = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
            alone = [llm.generate(one, params, use_tqdm=False)[0].outputs[0].token_ids for one in prompts]
            num_blocks = llm.client.statistics().num_blocks
            found[value] = llm.client.welcome.model_fingerprint, num_blocks
        assert together == alone
    assert found["auto"][0] != found["int8"][0]
    assert found["int8"][1] > 1.5 * found["auto"][1]
    assert replay([str(capture), "--mode", "full"]) == 0
