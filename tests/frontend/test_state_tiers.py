"""A model with recurrent layers whose states go to files and to a peer: the next turn finds them; no bit changes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine_core import LLM, SamplingParams
from tests.core.process.tiny_lfm2 import lfm2_folder
from tests.frontend.test_kv_dir import wait_for_stored
from tools.commands.keys import main as keys
from tools.commands.replay.__main__ import main as replay

pytestmark = pytest.mark.timeout(120)
SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 256, "max_num_seqs": 4}
SIZES |= {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22, "num_host_blocks": 60}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPT = [3 + 7 * number % 290 for number in range(150)]
NUM_STORED = 157 // 16 + 2  # the blocks of the first turn, its state, and that of one block before


def turns(llm: LLM) -> list[Any]:
    """Ask the second turn, and return its tokens with their log probabilities, and the number of cached tokens."""
    (output,) = llm.generate([{"prompt_token_ids": [*PROMPT, *range(3, 40)]}], PARAMS, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [[[(token, one.logprob) for token, one in place.items()] for place in logprobs], output.num_cached_tokens]


def first_turn(llm: LLM) -> None:
    llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)


def test_the_next_turn_starts_from_a_file_or_a_peer(tmp_path: Path) -> None:
    """The first engine is killed with all it had in memory; another has its folder."""
    model, key, address = str(lfm2_folder(tmp_path)), str(tmp_path / "key"), f"ipc://{tmp_path}/kv.sock"
    folder, capture = tmp_path / "kv", tmp_path / "run.cap"
    assert keys(["blocks", key]) == 0
    tiers: dict[str, Any] = {"kv_listen": address, "kv_key_file": key}
    with LLM(model, **SIZES, **tiers) as giver:
        expected, cached = turns(giver)
        assert cached == 0
        giver.reset_prefix_cache()
        first_turn(giver)
        with LLM(model, **SIZES, kv_peers=address, kv_key_file=key, kv_dir=folder, capture=str(capture)) as llm:
            assert turns(llm) == [expected, 144]
            assert llm.statistics().num_fetched_blocks == 144 // 16 + 1
            wait_for_stored(llm, NUM_STORED)
            os.kill(llm.client.welcome.pid, signal.SIGKILL)
            giver.close()
            assert turns(llm) == [expected, 176]
            assert llm.statistics().num_fetched_blocks == 176 // 16 + 1
    assert replay([f"{capture}.1"]) == 0  # of the second engine: the first one was killed
