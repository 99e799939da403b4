"""Models of which some layers have a window: whether these give KV blocks back, by their layers and the options."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from core.executors.local import LocalExecutor
from core.process.resolve import resolve
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig

WINDOW = 64
SETTINGS: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": None,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def executor(folder: Path, layers: str, **options: Any) -> LocalExecutor:
    """layers: a letter each, s for one with a window, f for one that sees everything."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    settings = {**SETTINGS, "num_hidden_layers": len(layers), "layer_types": [kinds[one] for one in layers]}
    (folder / "config.json").write_text(json.dumps(settings))
    given = {"dtype": "bfloat16", "threads": 1, "load_format": "dummy", **options}
    return LocalExecutor(EngineConfig(model=str(folder), **given))


@pytest.mark.parametrize(
    ("layers", "pages", "bytes_of_a_layer"),
    [
        ("sf", 1, 1),
        ("sssf", 3, 3),
        ("sssssfs", 6, 6),
        ("sssssfsssssfs", 6, 12),
        ("sff", 0, 3),
        ("ss", 0, 2),
        ("ff", 0, 2),
    ],
)
def test_a_page_has_the_layers_with_a_window(tmp_path: Path, layers: str, pages: int, bytes_of_a_layer: int) -> None:
    got = executor(tmp_path, layers)
    assert got.info.kv_page_blocks == pages
    assert got.info.kv_window == (WINDOW if pages or "f" not in layers else 0)
    num_bytes = 2 * 16 * 16 * 2  # K and V of 16 tokens in a layer
    assert got.determine_num_available_blocks(2**20, 16) == 2**20 // (num_bytes * bytes_of_a_layer)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"kv_page_blocks": 0}, "kv_page_blocks"),
    ],
)
def test_what_needs_all_blocks_keeps_them_unless_it_was_asked_otherwise(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    assert executor(tmp_path, "sssf", **options).info.kv_page_blocks == 0
    with pytest.raises(ConfigError, match=rf"kv_window=64: some layers .* with {name} the others keep"):
        executor(tmp_path, "sssf", kv_window=WINDOW, **options)


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_with_swapping_there_are_pages(tmp_path: Path, mode: Literal["swap", "auto"]) -> None:
    model = executor(tmp_path, "sssf", preemption_mode=mode, kv_window=WINDOW)
    assert model.info.kv_page_blocks == 3
    given = EngineConfig(model=str(tmp_path), preemption_mode=mode, swap_space_bytes=2**20, kv_cache_memory_bytes=2**20)
    fit = model.determine_num_available_blocks
    config = resolve(given, model.info, fit, total_memory_bytes=2**30, num_cpus=1)
    assert config.num_swap_blocks == 2**20 // 1024  # K and V of 16 tokens in a layer
    model.initialize_cache(config)
    assert min(model.measure_costs()) > 0


def test_the_host_has_blocks_of_the_layers_that_see_everything(tmp_path: Path) -> None:
    """One of layers with a window takes three of them; a store needs room for two of each kind."""
    given = EngineConfig(model=str(tmp_path), kv_host_bytes=2**20, kv_cache_memory_bytes=2**20, kv_dir="somewhere")
    model = executor(tmp_path, "sssf", kv_host_bytes=2**20)
    fit = model.determine_num_available_blocks
    config = resolve(given, model.info, fit, total_memory_bytes=2**30, num_cpus=1)
    assert (config.kv_page_blocks, config.num_host_blocks) == (3, 2**20 // 1024)
    few = EngineConfig(model=str(tmp_path), kv_host_bytes=8191, kv_cache_memory_bytes=2**20, kv_dir="somewhere")
    with pytest.raises(ConfigError, match=r"kv_dir needs room for 8 KV blocks on the host, .* at least 8192"):
        resolve(few, model.info, fit, total_memory_bytes=2**30, num_cpus=1)


def test_drafts_from_the_prompt_keep_pages_and_a_draft_model_does_not(tmp_path: Path) -> None:
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert executor(tmp_path, "sssf", speculative_config=ngram).info.kv_page_blocks == 3
    model = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=3)
    assert executor(tmp_path, "sssf", speculative_config=model).info.kv_page_blocks == 0


def test_a_longer_request_fits_than_all_layers_would_have_room_for(tmp_path: Path) -> None:
    """11 pages of 3 layers; without pages, 8 blocks of 4: 7 of 16 tokens each."""
    lengths, memory = [], {"kv_cache_memory_bytes": 33 * 1024, "max_num_batched_tokens": 16}
    for window in (None, 0):
        model = executor(tmp_path, "sssf", kv_window=window)
        config = EngineConfig(model=str(tmp_path), kv_window=window, **memory)
        fit = model.determine_num_available_blocks
        lengths.append(resolve(config, model.info, fit, total_memory_bytes=2**30, num_cpus=1).max_model_len)
    most_seen = -(-(WINDOW - 1 + 16) // 16) + 1
    assert lengths == [(11 - 1 - most_seen) * 3 * 16, 7 * 16]


def test_other_numbers_of_blocks_are_refused(tmp_path: Path) -> None:
    model = executor(tmp_path, "sssf")
    fit = model.determine_num_available_blocks
    with pytest.raises(ConfigError, match=r"kv_page_blocks=2: a page of .* has 3 KV blocks: leave it out, or use 0"):
        resolve(
            EngineConfig(model=str(tmp_path), kv_page_blocks=2), model.info, fit, total_memory_bytes=2**30, num_cpus=1
        )
