"""A model like Gemma 3 whose KV blocks go to the host, to files and to a peer: no token and no log probability changes.

Layers with a window give blocks back, and only those of the window come back.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine_core import LLM, SamplingParams
from tests.core.executors.test_window_pages import SETTINGS, WINDOW
from tests.frontend.test_kv_dir import wait_for_stored
from tools.commands.keys import main as keys
from tools.commands.replay.__main__ import EXIT_OTHER_MODEL
from tools.commands.replay.__main__ import main as replay

pytestmark = pytest.mark.timeout(120)
BLOCK = 16
#: Room for one request of these, and for three on the host. A page has 6 blocks.
SIZES: dict[str, Any] = {"dtype": "bfloat16", "threads": 1, "max_model_len": 384, "max_num_batched_tokens": 64}
SIZES |= {"load_format": "dummy", "skip_tokenizer_init": True, "num_blocks_override": 22, "num_host_blocks": 400}
LENGTHS = [40, 200, 300, 370]  # tokens: shorter than the window, and longer
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
_NUM_SEEN = WINDOW // BLOCK
NUM_BLOCKS = 2 * (23 + 3)  # of all: the longest of each conversation, and the last one of each shorter answer


def prompts() -> list[list[int]]:
    """Those of two conversations, which share the beginnings of each."""
    return [[first, *(3 + number * 7 % 400 for number in range(1, length))] for length in LENGTHS for first in (3, 4)]


@pytest.fixture(scope="module", name="model")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gemma")
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    settings = {**SETTINGS, "vocab_size": 512, "num_hidden_layers": len(kinds), "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def answers(llm: LLM) -> tuple[list[Any], list[int]]:
    """(tokens with the bits of their log probabilities, cached tokens) of the prompts, one after the other."""
    outputs = [llm.generate([{"prompt_token_ids": one}], PARAMS, use_tqdm=False)[0] for one in prompts()]
    return [bits(output) for output in outputs], [output.num_cached_tokens or 0 for output in outputs]


def bits(output: Any) -> list[Any]:
    logprobs = output.outputs[0].logprobs
    return [[(token, one.logprob) for token, one in place.items()] for place in logprobs]


@pytest.fixture(scope="module", name="expected")
def without_tiers(model: str) -> list[Any]:
    """What an engine says that keeps all blocks, and finds none."""
    sizes = {**SIZES, "num_host_blocks": 0, "num_blocks_override": 200, "kv_window": 0, "enable_prefix_caching": False}
    with LLM(model, **sizes) as llm:
        assert llm.statistics().num_host_blocks == 0
        return answers(llm)[0]


def whole(length: int) -> int:
    """How many tokens of a prompt can be found."""
    return (length - 1) // BLOCK * BLOCK


def test_the_host_gives_back_what_the_cache_has_evicted(model: str, expected: list[Any], tmp_path: Path) -> None:
    capture = tmp_path / "run.cap"
    with LLM(model, **SIZES, capture=str(capture)) as llm:
        for _ in range(2):
            got, cached = answers(llm)
            assert got == expected
        assert cached == [whole(length) for length in LENGTHS for _ in range(2)]
        assert llm.statistics().num_host_hits > 0
    assert replay([str(capture)]) == 0
    assert replay([str(capture), "--mode", "full"]) == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_with_preemption(model: str, expected: list[Any], mode: str) -> None:
    """Requests of two priorities, many at once, in a cache with room for two."""
    swap = {"preemption_mode": mode, "swap_space_bytes": 2**20, "scheduling_policy": "priority", "max_num_seqs": 4}
    with LLM(model, **{**SIZES, "num_blocks_override": 30}, **swap) as llm:
        for _ in range(3):
            asked = [{"prompt_token_ids": one} for one in prompts()]
            outputs = llm.generate(asked, PARAMS, use_tqdm=False, priority=[4, 3, 2, 1, 4, 3, 2, 1])
            assert [bits(output) for output in outputs] == expected
        statistics = llm.statistics()
    assert statistics.num_preemptions > 0
    assert statistics.num_host_hits > 0


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_workers_have_a_host_too(model: str, expected: list[Any], option: str) -> None:
    with LLM(model, **SIZES, **{option: 2}) as llm:
        for _ in range(2):
            assert answers(llm)[0] == expected
        assert llm.statistics().num_host_hits > 0


def test_files_outlive_the_engine_and_damage_is_computed_again(model: str, expected: list[Any], tmp_path: Path) -> None:
    folder, capture = tmp_path / "kv", tmp_path / "run.cap"
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        assert answers(llm)[0] == expected
        wait_for_stored(llm, NUM_BLOCKS * 2)
    with LLM(model, **SIZES, kv_dir=folder, capture=str(capture)) as llm:
        got, cached = answers(llm)
        assert got == expected
        assert cached[2:] == [whole(length) for length in LENGTHS[1:] for _ in range(2)]
        fetched = llm.statistics().num_fetched_blocks
        assert 0 < fetched < sum(cached) // BLOCK + len(cached) * _NUM_SEEN
    assert replay([str(capture)]) == 0
    assert replay([str(capture), "--mode", "full"]) == EXIT_OTHER_MODEL
    paths = sorted((folder / "blocks").glob("*.kv"), key=lambda path: (path.stat().st_size, path.name))
    of_windows = [path for path in paths if path.stat().st_size > paths[0].stat().st_size]
    assert of_windows
    for path in of_windows[::3]:
        damage(path)
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        assert answers(llm)[0] == expected
        assert llm.statistics().num_fetched_blocks > 0
    for path in (folder / "blocks").glob("*.kv"):
        damage(path)
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        assert answers(llm)[0] == expected


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_a_killed_engine_has_written_is_whole(model: str, expected: list[Any], tmp_path: Path) -> None:
    """It is started again, and finds it."""
    with LLM(model, **SIZES, kv_dir=tmp_path / "kv") as llm:
        asked = [{"prompt_token_ids": one} for one in prompts()]
        llm.generate(asked, PARAMS, use_tqdm=False)
        wait_for_stored(llm, 10)
        before = llm.client.welcome.pid
        os.kill(before, signal.SIGKILL)
        assert answers(llm)[0] == expected
        assert llm.client.welcome.pid != before
        assert llm.statistics().num_fetched_blocks > 0


def test_a_peer_has_them_while_it_lives(model: str, expected: list[Any], tmp_path: Path) -> None:
    key, address = str(tmp_path / "key"), f"ipc://{tmp_path}/kv.sock"
    assert keys(["blocks", key]) == 0
    with LLM(model, **SIZES, kv_listen=address, kv_key_file=key) as giver:
        assert answers(giver)[0] == expected
        with LLM(model, **SIZES, kv_peers=address, kv_key_file=key) as taker:
            got, cached = answers(taker)
            assert got == expected
            assert cached[4:] == [whole(length) for length in LENGTHS[2:] for _ in range(2)]
            assert taker.statistics().num_fetched_blocks > 0
            giver.close()
            taker.reset_prefix_cache()
            assert answers(taker)[0] == expected


def test_engines_with_and_without_pages_do_not_meet(model: str, expected: list[Any], tmp_path: Path) -> None:
    with LLM(model, **SIZES, kv_dir=tmp_path / "kv") as llm:
        assert answers(llm)[0] == expected
    sizes = {**SIZES, "num_blocks_override": 200, "kv_window": 0}
    with LLM(model, **sizes, kv_dir=tmp_path / "kv") as llm:
        assert answers(llm)[0] == expected
        assert llm.statistics().num_fetched_blocks == 0
