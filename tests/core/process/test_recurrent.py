"""What a model with recurrent layers makes of an engine's config, and of requests."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.engine import EngineCore
from core.execution.executor import ModelInfo
from core.execution.state_slots import most_drafts, num_draft_states, num_state_slots, num_states, num_swap_states
from core.executors.local import LocalExecutor
from core.process.resolve import for_recurrent_layers, resolve
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.options.step_sizes import SizedConfig
from ipc.wire.messages import AddRequest
from tests.core.draft_heads import LLAMA
from tests.core.process.tiny_lfm2 import lfm2_folder
from tests.core.runner.heard import Heard
from tests.core.runner.invariance import request

INFO = ModelInfo("tiny", "00", "float32", 1000, 2048, (2,), "L2", state_bytes=1000)


def resolved(info: ModelInfo = INFO, **options: Any) -> EngineConfig:
    def blocks_in(memory_bytes: int, block_size: int) -> int:
        return memory_bytes // (100 * block_size)

    config = EngineConfig(max_model_len=64, **options)
    return resolve(config, info, blocks_in, total_memory_bytes=1 << 30, num_cpus=1)


def test_states_take_a_part_of_the_caches_memory() -> None:
    config = resolved(kv_cache_memory_bytes=100_000, max_num_seqs=16, enable_prefix_caching=False)
    assert config.num_blocks_override == (100_000 - 16_000) // 1600
    assert (config.max_num_seqs, num_state_slots(config, 1000)) == (16, 0)


def test_states_are_kept_in_what_is_left_of_half_of_it() -> None:
    config = resolved(kv_cache_memory_bytes=100_000, max_num_seqs=16)
    assert config.num_blocks_override == (100_000 - 50_000) // 1600
    assert (config.max_num_seqs, num_state_slots(config, 1000)) == (16, 34)
    assert num_state_slots(resolved(kv_cache_memory_bytes=100_000, max_num_seqs=2), 1000) == 48
    assert num_state_slots(resolved(kv_cache_memory_bytes=1_000_000, max_num_seqs=2), 1000) == 4 * 2 + 2 * 64
    whole = for_recurrent_layers(SizedConfig(enable_chunked_prefill=False), INFO, 100_000)
    assert whole.enable_prefix_caching


def test_where_states_do_not_fit_fewer_requests_run_at_once() -> None:
    config = resolved(kv_cache_memory_bytes=20_000, max_num_seqs=16)
    assert (config.max_num_seqs, config.num_blocks_override, config.enable_prefix_caching) == (8, 10_000 // 1600, True)
    config = for_recurrent_layers(SizedConfig(max_num_seqs=16), INFO, 7_900)
    assert (config.max_num_seqs, config.enable_prefix_caching) == (3, False)
    with pytest.raises(OutOfMemoryError, match=r"state of a request takes 1000 bytes.*set it to at least 2000"):
        resolved(kv_cache_memory_bytes=1_999)


def test_states_of_swapped_requests_take_half_of_the_swap_space() -> None:
    config = resolved(kv_cache_memory_bytes=100_000, max_num_seqs=4, preemption_mode="swap", swap_space_bytes=24_000)
    assert (num_swap_states(config, 1000), config.num_swap_blocks) == (12, 12_000 // 1600)
    assert num_states(config, 1000) == 4 + num_state_slots(config, 1000) + 12
    config = resolved(kv_cache_memory_bytes=100_000, max_num_seqs=2, preemption_mode="auto", swap_space_bytes=26_000)
    assert (num_swap_states(config, 1000), config.num_swap_blocks) == (8, 18_000 // 1600)


def test_preemption_counts_a_state_by_its_bytes(engine: EngineCore, folder: Path) -> None:
    state_bytes = 2 * 2 * 48 * 4  # of two layers of convolutions with three taps, in float32
    block_bytes = 2 * 2 * 2 * 12 * 4  # K and V of 2 tokens in the layer that attends
    assert engine.scheduler.preemption.state_blocks == 1
    assert made(folder, block_size=2).scheduler.preemption.state_blocks == state_bytes // block_bytes == 2


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1, step_ns=(10**6,) * 8)


def test_each_draft_of_a_step_has_a_state() -> None:
    config = resolved(kv_cache_memory_bytes=100_000, max_num_seqs=16, speculative_config=NGRAM)
    assert (num_draft_states(config, 1000), num_state_slots(config, 1000)) == (6, 28)
    assert config.num_blocks_override == (100_000 - 50_000) // 1600
    config = resolved(kv_cache_memory_bytes=16_000, max_num_seqs=16, speculative_config=NGRAM)
    assert (config.max_num_seqs, num_state_slots(config, 1000), num_draft_states(config, 1000)) == (5, 2, 1)
    with pytest.raises(ConfigError, match=r"speculative_config: a draft of tiny needs.*to at least 16000"):
        resolved(kv_cache_memory_bytes=15_999, speculative_config=NGRAM)


def test_steps_in_flight_in_stages_and_on_a_gpu_share_the_states_of_drafts() -> None:
    options: dict[str, Any] = {"max_num_seqs": 16, "pipeline_parallel_size": 2, "speculative_config": NGRAM}
    config = resolved(kv_cache_memory_bytes=100_000, **options)
    assert (num_draft_states(config, 1000), most_drafts(config, 1000)) == (6, 3)
    ranks = msgspec.structs.replace(config, tensor_parallel_size=2, pipeline_parallel_size=1)
    assert most_drafts(ranks, 1000) == 6
    on_gpu = msgspec.structs.replace(ranks, tensor_parallel_size=1, device="cuda")
    for overlaps, most in ((True, 3), (False, 6)):
        assert most_drafts(msgspec.structs.replace(on_gpu, async_scheduling=overlaps), 1000) == most
    with pytest.raises(ConfigError, match=r"too small for 2 drafts in flight: set it to at least 32000"):
        resolved(kv_cache_memory_bytes=31_999, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lfm2_folder(tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineCore:
    return made(folder)


def made(folder: Path, **options: Any) -> EngineCore:
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="float32", threads=1, max_num_seqs=4)
    config = msgspec.structs.replace(config, **options)
    executor = LocalExecutor(config)
    config = resolve(
        config, executor.info, executor.determine_num_available_blocks, total_memory_bytes=1 << 28, num_cpus=1
    )
    executor.initialize_cache(config)
    executor.warm_up()
    return EngineCore(config, executor)


PROMPT = list(range(3, 40))


def tokens(engine: EngineCore, *inbox: tuple[int, AddRequest]) -> dict[tuple[int, int], list[int]]:
    heard, pending = Heard(7, len(PROMPT)), list(inbox)
    while pending or engine.has_unfinished:
        heard.take(engine.step(pending, 0))
        pending = []
    return heard.tokens


def test_choices_have_the_tokens_of_choices_alone(engine: EngineCore) -> None:
    several = tokens(engine, request(7, PROMPT, 12, 0.9, n=3))
    assert len({tuple(one) for one in several.values()}) > 1
    assert several[7, 0] == tokens(engine, request(7, PROMPT, 12, 0.9))[7, 0]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_drafts_change_no_token(engine: EngineCore, folder: Path, method: str, tmp_path: Path) -> None:
    settings = NGRAM
    if method != "ngram":
        head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 48}
        head["eagle_aux_hidden_state_layer_ids"] = [1, 2]  # a layer that attends, and one that does not
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | (head if method == "eagle3" else {})))
        settings = SpeculativeConfig(method=method, model=str(tmp_path), step_ns=(10**9,) * 8)
    drafting = made(folder, speculative_config=settings)
    crowd = [request(n, [*PROMPT, *PROMPT[:n]], 40, n % 2 * 0.4) for n in range(1, 7)]
    assert tokens(drafting, *crowd) == tokens(engine, *crowd)
    stats = drafting.scheduler.stats
    assert stats.num_draft_tokens > 10
    assert stats.num_accepted_tokens > 10 or method != "ngram"
