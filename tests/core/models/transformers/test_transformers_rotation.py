"""Rope types whose frequencies transformers chooses by length: here they are always those of max_model_len tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.executors.local import LocalExecutor
from core.models.transformers.transformers_model import Rotation, TransformersModel
from core.process.resolve import resolve
from ipc.errors import UnsupportedModelError
from ipc.options.config import EngineConfig
from kernels.elements import FLOAT32
from tests.core.models.transformers.test_transformers_model import SIZES, VOCAB, config_for, generate, greedy, save

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

BORDER = 64  # tokens that the model was first made for
#: Far from each other, so that the wrong ones show; one for each pair of a head's 16 dimensions.
SHORT, LONG = [1.0] * 8, [1.0 + 3.0 * n for n in range(8)]


def longrope(short: list[float] = SHORT, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": LONG}
    return {
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "original_max_position_embeddings": BORDER,
        "rope_parameters": {**rope, "original_max_position_embeddings": BORDER, **more},
    }


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


#: One far below the border, one that crosses it with its 12 tokens, one beyond it.
PROMPTS = [prompt(1, 20), prompt(2, BORDER - 6), prompt(3, 100)]


def test_a_request_does_not_depend_on_its_neighbours_length(tmp_path: Path) -> None:
    """All have the long factors: those of a model whose short factors are the long ones."""
    save("phi3", tmp_path / "model", **longrope())
    model = save("phi3", tmp_path / "always long", **longrope(short=LONG))
    expected = [greedy(model, one, 12) for one in PROMPTS]
    config = config_for(tmp_path / "model", max_num_batched_tokens=64)
    assert generate(config, PROMPTS, 12) == expected
    assert [generate(config, [one], 12)[0] for one in PROMPTS] == expected


def test_up_to_the_border_the_short_factors_serve(tmp_path: Path) -> None:
    model = save("phi3", tmp_path, **longrope())
    short = [prompt(1, 20), prompt(4, 40)]
    expected = [greedy(model, one, 12) for one in short]
    for options in ({"max_model_len": BORDER}, {"num_blocks_override": 5}):  # the cache has room for 64 tokens
        assert generate(config_for(tmp_path, **options), short, 12) == expected
    longer = config_for(tmp_path, max_model_len=BORDER + 1)
    assert generate(longer, short, 12) != expected


def test_the_choice_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The choice counts at an engine's start and in a replay, which is given the resolved config."""
    save("phi3", tmp_path, **longrope())
    long, short, clipped = (
        started(config_for(tmp_path, **options))
        for options in ({}, {"max_model_len": BORDER}, {"num_blocks_override": 5})
    )
    assert long[1] != short[1] == clipped[1]
    for config, fingerprint in (long, short, clipped):
        assert LocalExecutor(config).info.fingerprint == fingerprint


def started(config: EngineConfig) -> tuple[EngineConfig, str]:
    executor = LocalExecutor(config)
    blocks_in = executor.determine_num_available_blocks
    config = resolve(config, executor.info, blocks_in, total_memory_bytes=1 << 30, num_cpus=1)
    executor.initialize_cache(config)
    return config, executor.info.fingerprint


def test_dynamic_scaling_stays_that_of_the_model_s_own_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = save("olmo2", tmp_path, num_key_value_heads=2, rope_parameters=rope)
    expected = [greedy(model, one, 12) for one in PROMPTS]
    assert generate(config_for(tmp_path), PROMPTS, 12) == expected

    def run(length: int) -> torch.Tensor:
        model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
        return model.model.rotary_emb.inv_freq.clone()

    before, scaled, again = run(256), run(512), run(100)
    assert not torch.equal(before, scaled)
    assert torch.equal(before, again)
    settled = Rotation(model).settle(lambda: run(256))
    assert torch.equal(settled, before)
    assert torch.equal(run(512), settled)


def test_kinds_of_layers_with_frequencies_of_their_own(tmp_path: Path) -> None:
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
    rope = longrope()["rope_parameters"]
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": rope}
    save("gemma3_text", tmp_path, **window, num_key_value_heads=2, rope_parameters=kinds)
    config = config_for(tmp_path, model_impl="transformers", max_num_batched_tokens=64)
    assert [generate(config, [one], 12)[0] for one in PROMPTS] == generate(config, PROMPTS, 12)


@pytest.mark.parametrize("long_mscale", [1.2, 1.5])
def test_a_rotation_that_cannot_be_settled_is_refused(long_mscale: float, tmp_path: Path) -> None:
    """PhiMoE's code takes the short factors whatever the length, and scales by the longest request in the batch."""
    more = {"short_mscale": 1.2, "long_mscale": long_mscale}
    save("phimoe", tmp_path, **longrope(**more), num_local_experts=4, sliding_window=None)
    with pytest.raises(UnsupportedModelError, match="PhimoeRotaryEmbedding: its rotation uses the longest request"):
        TransformersModel(tmp_path, FLOAT32)
    TransformersModel(tmp_path, FLOAT32, max_model_len=BORDER)


def test_others_are_left_alone(tmp_path: Path) -> None:
    model = save("olmo2", tmp_path, **SIZES, num_key_value_heads=2)
    assert not Rotation(model)
