"""resolve: nothing is left open, and what cannot fit is refused with the numbers."""

import msgspec
import pytest
from msgspec.structs import replace

from core import log
from core.execution.executor import Costs, ModelInfo, StepCosts
from core.executors.fake import FakeExecutor
from core.process import prepare as prepare_module
from core.process.resolve import default_cache_bytes, resolve, resolve_costs
from ipc.errors import ConfigError, OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.options.step_sizes import most_rows

GIB = 1 << 30
BYTES_PER_TOKEN = 4096
INFO = ModelInfo("tiny", "00", "float32", vocab_size=1000, max_model_len=2048, eos_token_ids=(2,), numerics="L2")


def blocks_in(memory_bytes: int, block_size: int) -> int:
    return memory_bytes // (block_size * BYTES_PER_TOKEN)


def resolved(memory: int = 64 * GIB, cpus: int = 4, **options: object) -> ResolvedConfig:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return resolve(config, INFO, blocks_in, total_memory_bytes=memory, num_cpus=cpus)


def test_the_durations_of_steps_are_frozen() -> None:
    """Measured once; durations that are given, as in a capture's config, are taken."""
    config = msgspec.structs.replace(resolved(), speculative_config=SpeculativeConfig(method="ngram"))
    once = resolve_costs(config, EngineConfig(), not_asked, lambda: StepCosts((7, 8, 9), 5, (10, 12)))
    expected = SpeculativeConfig(method="ngram", step_ns=(7, 8, 9), draft_ns=5, alone_ns=(10, 12))
    assert once.speculative_config == expected
    assert (
        resolve_costs(once, once, not_asked, lambda: StepCosts((1, 1, 1))).speculative_config == once.speculative_config
    )


def test_nothing_is_left_open() -> None:
    config = resolve_costs(resolved(), EngineConfig(), not_asked)
    assert [name for name in config.__struct_fields__ if getattr(config, name) is None] == [
        "model",
        "mmproj",
        "chat_template",
        "master_addr",
        "image_max_pixels",
        "classifier_from_token",
        "kv_dir",
        "kv_listen",
        "kv_peers",
        "kv_key_file",
        "kv_transfer_config",
        "capture",
        "flight_recorder_folder",
        "speculative_config",
    ]
    assert (config.max_model_len, config.threads) == (2048, 4)
    assert config.kv_cache_memory_bytes == 4 * GIB


def not_asked() -> Costs:
    raise AssertionError("measured, and decides nothing")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (70, 800)),
        ({"recompute_ns_per_token": 5}, (5, 800)),
        ({"swap_ns_per_block": 6}, (70, 6)),
    ],
)
def test_costs_are_measured_for_auto_where_they_are_not_given(given: dict[str, int], expected: tuple[int, int]) -> None:
    options = {"preemption_mode": "auto", **given}
    config = resolve_costs(resolved(**options), EngineConfig(**options), lambda: Costs(70, 800))  # type: ignore[arg-type]
    assert (config.recompute_ns_per_token, config.swap_ns_per_block) == expected


def test_costs_are_not_measured_where_both_are_given() -> None:
    given = {"preemption_mode": "auto", "recompute_ns_per_token": 5, "swap_ns_per_block": 6}
    assert resolve_costs(resolved(**given), EngineConfig(**given), not_asked).recompute_ns_per_token == 5


def test_swap_space_becomes_blocks() -> None:
    assert resolved(swap_space_bytes=GIB).num_swap_blocks == 0  # recompute
    assert resolved(preemption_mode="swap", swap_space_bytes=GIB).num_swap_blocks == GIB // (16 * BYTES_PER_TOKEN)
    assert resolved(preemption_mode="swap", num_swap_blocks=7).num_swap_blocks == 7


def test_a_resolved_config_resolves_to_itself() -> None:
    config = resolved(kv_cache_memory_bytes=100 * 16 * BYTES_PER_TOKEN)
    assert resolve(config, INFO, blocks_in, total_memory_bytes=GIB, num_cpus=1) == config


def test_the_budget_of_a_step_is_512_and_for_whole_prompts_at_least_the_longest() -> None:
    assert resolved().max_num_batched_tokens == 512
    assert resolved(max_num_batched_tokens=64).max_num_batched_tokens == 64
    whole = {"enable_chunked_prefill": False}
    assert resolved(**whole).max_num_batched_tokens == INFO.max_model_len == 2048
    assert resolved(**whole, max_model_len=1000).max_num_batched_tokens == 1000
    assert resolved(**whole, max_model_len=100).max_num_batched_tokens == 512
    assert resolved(**whole, num_blocks_override=51).max_num_batched_tokens == 50 * 16  # what the cache has room for


def test_a_larger_budget_is_a_default_only() -> None:
    def budget(info: ModelInfo = INFO, **options: object) -> int:
        config = EngineConfig(**options)  # type: ignore[arg-type]
        chosen = resolve(config, info, blocks_in, total_memory_bytes=64 * GIB, num_cpus=1, step_tokens=1024)
        return chosen.max_num_batched_tokens

    assert budget() == 1024
    assert budget(max_num_batched_tokens=64) == 64
    assert budget(enable_chunked_prefill=False) == INFO.max_model_len == 2048
    assert budget(replace(INFO, max_whole_tokens=2000), max_num_seqs=9) == 2008
    assert budget(replace(INFO, kv_window=64, kv_page_blocks=2)) == 512, "requests would take more of the cache"


@pytest.mark.parametrize(
    ("device_bytes", "expected"),
    [
        (0, (32, 512)),
        (8 * GIB, (256, 4096)),
        (36 * GIB - 1, (256, 4096)),
        (40 * GIB, (512, 8192)),
        (79 * GIB, (1024, 8192)),
        (139 * GIB, (1024, 8192)),
    ],
)
def test_rows_and_budget_follow_the_memory_of_the_device(device_bytes: int, expected: tuple[int, int]) -> None:
    info = msgspec.structs.replace(INFO, device_memory_bytes=device_bytes)

    def sizes(**options: object) -> tuple[int, int]:
        config = EngineConfig(**options)  # type: ignore[arg-type]
        found = resolve(config, info, blocks_in, total_memory_bytes=64 * GIB, num_cpus=1)
        assert found.max_num_seqs <= most_rows(config), "the owner makes the black box before the engine knows its rows"
        return found.max_num_seqs, found.max_num_batched_tokens

    assert sizes() == expected
    assert sizes(max_num_seqs=7) == (7, expected[1])
    assert sizes(max_num_batched_tokens=100) == (expected[0], 100)
    assert sizes(enable_chunked_prefill=False) == (expected[0], max(2048, expected[1]))


def test_sizes_that_a_device_chose_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(log, "say", said.append)

    def start(device_bytes: int, **options: object) -> None:
        def load(config: EngineConfig) -> FakeExecutor:
            executor = FakeExecutor(config)
            executor.info = msgspec.structs.replace(executor.info, device_memory_bytes=device_bytes)
            return executor

        monkeypatch.setattr(prepare_module, "load_executor", load)
        config = EngineConfig(executor="fake", kv_cache_memory_bytes=GIB, **options)  # type: ignore[arg-type]
        prepare_module.prepare(config, lambda phase: None)

    start(0)
    start(80 * GIB, max_num_seqs=4, max_num_batched_tokens=64)
    assert said == []
    start(80 * GIB, max_num_seqs=4)
    start(24 * GIB)
    assert said == [
        "engine-core: max_num_batched_tokens=8192, chosen by the device's memory of 80 GiB",
        "engine-core: max_num_seqs=256 and max_num_batched_tokens=4096, chosen by the device's memory of 24 GiB",
    ]


def test_a_given_budget_that_no_longest_whole_prompt_fits_is_refused_with_the_numbers() -> None:
    whole = {"enable_chunked_prefill": False, "max_model_len": 1000}
    assert resolved(**whole, max_num_batched_tokens=1000).max_num_batched_tokens == 1000
    with pytest.raises(ConfigError) as caught:
        resolved(**whole, max_num_batched_tokens=512)
    assert str(caught.value) == (
        "max_num_batched_tokens=512 is less than max_model_len=1000, and with enable_chunked_prefill=false a whole "
        "prompt must fit one step: leave max_num_batched_tokens out, set it to at least 1000, or set max_model_len to "
        "at most 512"
    )
    with pytest.raises(ConfigError, match=r"max_model_len=2048, .* set max_model_len to at most 999"):
        resolved(enable_chunked_prefill=False, max_num_batched_tokens=999)


def test_what_is_given_stays() -> None:
    config = resolved(threads=3, max_model_len=100, kv_cache_memory_bytes=GIB)
    assert (config.threads, config.max_model_len, config.kv_cache_memory_bytes) == (3, 100, GIB)


def test_default_memory_is_a_quarter_and_at_most_4_gib() -> None:
    assert default_cache_bytes(8 * GIB) == 2 * GIB
    assert default_cache_bytes(64 * GIB) == 4 * GIB


def test_no_more_blocks_than_requests_can_use() -> None:
    config = resolved(max_num_seqs=3, max_model_len=100)
    assert config.num_blocks_override == 3 * 7 + 1  # ceil(100 / 16) = 7, and the null block
    assert resolved(max_num_seqs=3, max_model_len=100, num_blocks_override=500).num_blocks_override == 500


def test_a_small_cache_clips_the_model_length() -> None:
    config = resolved(kv_cache_memory_bytes=11 * 16 * BYTES_PER_TOKEN + 5)
    assert config.num_blocks_override == 11
    assert config.max_model_len == 10 * 16
    assert resolved(num_blocks_override=2, block_size=2).max_model_len == 2


def test_explicit_length_beyond_the_cache() -> None:
    needed = (1000 // 16 + 1 + 1) * 16 * BYTES_PER_TOKEN
    with pytest.raises(OutOfMemoryError) as caught:
        resolved(max_model_len=1000, kv_cache_memory_bytes=needed - 1)
    assert str(caught.value) == (
        "a request of max_model_len=1000 tokens needs 64 KV blocks of 16 tokens (including the null block), but the "
        "cache has 63: set max_model_len to at most 992, "
        f"or set kv_cache_memory_bytes to at least {needed} (it is {needed - 1})"
    )
    assert resolved(max_model_len=1000, kv_cache_memory_bytes=needed).max_model_len == 1000
    assert resolved(max_model_len=992, kv_cache_memory_bytes=needed - 1).max_model_len == 992


def test_explicit_length_beyond_the_given_blocks() -> None:
    with pytest.raises(OutOfMemoryError, match=r"or set num_blocks_override to at least 64$"):
        resolved(max_model_len=1000, num_blocks_override=63)


def test_not_even_one_block() -> None:
    needed = 2 * 16 * BYTES_PER_TOKEN
    with pytest.raises(OutOfMemoryError, match=f"room for 1 block of.*needs at least 2.*at least {needed} "):
        resolved(kv_cache_memory_bytes=needed - 1)
    assert resolved(kv_cache_memory_bytes=needed).max_model_len == 16
    with pytest.raises(OutOfMemoryError, match="room for 0 blocks"):
        resolved(memory=100)


def test_a_block_of_one_token_is_not_enough_for_prompt_and_output() -> None:
    with pytest.raises(OutOfMemoryError, match="at least 3"):
        resolved(num_blocks_override=2, block_size=1)


def test_length_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match="max_model_len=2049 is more than the 2048 tokens that tiny supports"):
        resolved(max_model_len=2049)


def test_the_window_of_the_kv_cache_is_the_models() -> None:
    sliding = msgspec.structs.replace(INFO, kv_window=64)

    def window(info: ModelInfo, **given: int) -> int | None:
        config = EngineConfig(**given)
        return resolve(config, info, blocks_in, total_memory_bytes=GIB, num_cpus=1).kv_window

    assert window(sliding) == 64
    assert window(INFO) == 0
    assert window(sliding, kv_window=0) == 0
    assert window(sliding, kv_window=100) == 100
    with pytest.raises(ConfigError, match="kv_window=63: a token of tiny may see 64 tokens"):
        window(sliding, kv_window=63)
    with pytest.raises(ConfigError, match="kv_window=64: a token of tiny may see all tokens before it"):
        window(INFO, kv_window=64)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ({"kv_host_bytes": 2 * 16 * BYTES_PER_TOKEN - 1}, "kv_host_bytes=131071 is 1 .*at least 131072"),
        ({"kv_host_bytes": 100}, "kv_host_bytes=100 is 0 .*65536 bytes"),
        ({"num_host_blocks": 1}, "num_host_blocks=1 is 1 .*at least 2"),
    ],
)
def test_files_of_blocks_need_room_for_two_on_the_host(host: dict[str, int], told: str) -> None:
    options = {"executor": "local", "block_size": 16, **host}
    assert (resolved(**options).num_host_blocks or 0) < 2, "the host's memory alone may have any size"
    with pytest.raises(ConfigError, match=told):
        resolved(**options, kv_dir="kv")


def test_images_have_a_budget_and_a_cache() -> None:
    info = msgspec.structs.replace(INFO, image_tokens=64, image_token_bytes=4096)

    def sizes(**options: object) -> tuple[int, int]:
        given = EngineConfig(**options)  # type: ignore[arg-type]
        config = resolve(given, info, blocks_in, total_memory_bytes=64 * GIB, num_cpus=4)
        return config.max_num_encoder_input_tokens, config.encoder_cache_size

    assert sizes() == (64, 65_536)  # 256 MiB
    assert sizes(max_num_encoder_input_tokens=640, encoder_cache_size=64) == (640, 64)
    assert sizes(enable_chunked_prefill=False) == (2048, 65_536)
    for name in ("max_num_encoder_input_tokens", "encoder_cache_size"):
        for value in (0, 63):
            with pytest.raises(
                ConfigError, match=f"{name}={value}: an image of tiny has 64 tokens: set it to at least 64"
            ):
                sizes(**{name: value})
        with pytest.raises(ConfigError, match="one step encodes all images of a prompt: set it to at least 2048"):
            sizes(enable_chunked_prefill=False, **{name: 640})
    none = resolved(max_num_encoder_input_tokens=640)
    assert (none.max_num_encoder_input_tokens, none.encoder_cache_size) == (0, 0)
