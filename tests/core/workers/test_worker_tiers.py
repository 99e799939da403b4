"""KV blocks and recurrent states of worker processes in files: the next engine finds them, whoever was killed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine_core import LLM, SamplingParams
from tests.core.executors.test_window_pages import SETTINGS
from tests.core.workers.test_nodes import free_port, machines, over
from tests.frontend.http.caller import wait_for
from tools.commands.keys import main as keys
from tools.commands.replay.__main__ import main as replay

pytestmark = pytest.mark.timeout(120)
SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 256, "max_num_seqs": 4}
SIZES |= {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**23, "num_host_blocks": 60}
SIZES |= {"generation_config": "vllm"}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPT = [3 + 7 * number % 290 for number in range(150)]
SECOND = [*PROMPT, *range(3, 40)]
NUM_STORED = 157 // 16 + 2  # the blocks of the first turn, its state, and that of one block before
SHAPES: dict[str, dict[str, Any]] = {
    "one worker": {"distributed_executor_backend": "mp"},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


def ask(llm: LLM, prompt: list[int]) -> tuple[list[Any], int | None]:
    (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [[(token, one.logprob) for token, one in place.items()] for place in logprobs], output.num_cached_tokens


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def wait_for_stored(llm: LLM, count: int) -> None:
    wait_for(lambda: llm.statistics().num_stored_blocks >= count)


@pytest.fixture(scope="module")
def expected(hybrid: str) -> list[Any]:
    """The first and the second turn, by one process that stores nothing."""
    with LLM(hybrid, **SIZES) as llm:
        return [ask(llm, prompt)[0] for prompt in (PROMPT, SECOND)]


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.soak if shape == "one worker" else []) for shape in SHAPES]
)
def test_after_a_kill_of_everything_the_next_turn_finds_blocks_and_states(
    hybrid: str, expected: list[Any], shape: str, tmp_path: Path
) -> None:
    options = {**SIZES, **SHAPES[shape], "kv_dir": tmp_path / "kv"}
    with LLM(hybrid, **options) as llm:
        assert ask(llm, PROMPT) == (expected[0], 0)
        wait_for_stored(llm, NUM_STORED)
        os.kill(llm.client.welcome.pid, signal.SIGKILL)  # its workers end with it
    capture = tmp_path / "run.cap"
    with LLM(hybrid, **options, capture=str(capture)) as llm:
        assert ask(llm, SECOND) == (expected[1], 144)
        assert llm.statistics().num_fetched_blocks == 144 // 16 + 1
    assert replay([str(capture)]) == 0


def test_what_a_dead_worker_held_is_read_from_its_files(hybrid: str, expected: list[Any], tmp_path: Path) -> None:
    """Nothing of the memory of workers that are gone, or of those that follow, goes under a wrong name."""
    options = {**SIZES, **SHAPES["two ranks"], "kv_dir": tmp_path / "kv"}
    with LLM(hybrid, **options) as llm:
        ask(llm, PROMPT)
        wait_for_stored(llm, NUM_STORED)
        (worker, *_) = children_of(llm.client.welcome.pid)
        os.kill(worker, signal.SIGKILL)
        assert ask(llm, SECOND) == (expected[1], 144)
        wait_for_stored(llm, NUM_STORED + 1)
    with LLM(hybrid, **options) as llm:
        assert ask(llm, SECOND) == (expected[1], 176)


@pytest.mark.parametrize("shape", ["two stages", pytest.param("two ranks", marks=pytest.mark.soak)])
def test_blocks_and_states_of_a_worker_on_another_machine(
    hybrid: str, expected: list[Any], shape: str, tmp_path: Path
) -> None:
    """Its machine dies, with all it has; then the engine, too."""
    port = free_port()
    options = {**SIZES, **SHAPES[shape], **over(port, 2), "kv_dir": tmp_path / "kv"}
    with machines(tmp_path, port, 1) as (other,):
        with LLM(hybrid, **options) as llm:
            assert ask(llm, PROMPT) == (expected[0], 0)
            wait_for_stored(llm, NUM_STORED)
            other.fail()
            assert ask(llm, SECOND) == (expected[1], 144)
            wait_for_stored(llm, NUM_STORED + 1)
            os.kill(llm.client.welcome.pid, signal.SIGKILL)
        with LLM(hybrid, **options) as llm:
            assert ask(llm, SECOND) == (expected[1], 176)
    with LLM(hybrid, **{**SIZES, **SHAPES[shape], "kv_dir": tmp_path / "kv"}) as llm:
        assert ask(llm, SECOND) == (expected[1], 176)  # on one machine


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
def test_peers_give_each_other_blocks_and_states(hybrid: str, expected: list[Any], shape: str, tmp_path: Path) -> None:
    key, address = str(tmp_path / "key"), f"ipc://{tmp_path}/kv.sock"
    assert keys(["blocks", key]) == 0
    options = {**SIZES, **SHAPES[shape], "kv_key_file": key}
    with LLM(hybrid, **options, kv_listen=address) as giver:
        ask(giver, PROMPT)
        with LLM(hybrid, **options, kv_peers=address) as taker:
            assert ask(taker, SECOND) == (expected[1], 144)


@pytest.mark.parametrize("shape", ["two ranks", pytest.param("two stages", marks=pytest.mark.soak)])
def test_blocks_of_layers_with_a_window_are_found_too(shape: str, tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    settings = {**SETTINGS, "vocab_size": 512, "num_hidden_layers": len(kinds), "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    options = {**SIZES, **SHAPES[shape], "max_model_len": 384, "num_host_blocks": 200, "kv_dir": tmp_path / "kv"}
    first = [3 + number * 7 % 400 for number in range(300)]
    with LLM(str(tmp_path), **SIZES | {"max_model_len": 384, "num_host_blocks": 0}) as llm:
        alone = ask(llm, [*first, *range(3, 40)])[0]
    with LLM(str(tmp_path), **options) as llm:
        ask(llm, first)
        wait_for_stored(llm, 300 // 16)
        os.kill(llm.client.welcome.pid, signal.SIGKILL)
    with LLM(str(tmp_path), **options) as llm:
        assert ask(llm, [*first, *range(3, 40)]) == (alone, 288)
