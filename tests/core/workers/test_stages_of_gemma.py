"""Stages of models whose layers have inputs of their own, share K and V or have several streams: Gemma 4 and 3n."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.executors.by_name import load_executor
from ipc.errors import ConfigError
from tests.core.workers.part_answers import GEMMA, STREAMS, answers, config_of, kill, requests
from tests.core.workers.test_nodes import free_port, machines, over

#: Layers 4 and 5 read K and V of 2 and 3.
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma 4": {
        **GEMMA,
        **_SHARED,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 500,
        "use_double_wide_mlp": True,
    },
    "gemma 3n": {**STREAMS, **_SHARED, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.7, 0.0]},
}
OPTIONS = {"num_gpu_blocks_override": 16}  # the blocks of Gemma 4 are pages


@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_bits_of_one_process_and_their_death_is_a_pause(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    alone = answers(config_of(str(tmp_path), 1, **OPTIONS))
    assert answers(config_of(str(tmp_path), 1, pipeline_parallel_size=2, **OPTIONS), {9: kill(0)}) == alone


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 3), (2, 2), (2, 3)])
def test_every_bit_at_any_shape_and_whichever_stage_dies(
    tmp_path: Path, ranks: int, stages: int, name: str, dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    alone = answers(config_of(str(tmp_path), 1, dtype=dtype, **OPTIONS))
    config = config_of(str(tmp_path), ranks, dtype=dtype, pipeline_parallel_size=stages, **OPTIONS)
    assert answers(config, {5: kill(0), 40: kill(ranks * stages - 1)}) == alone


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_stages_on_two_machines(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    alone = answers(config_of(str(tmp_path), 1, **OPTIONS))
    port = free_port()
    with machines(tmp_path, port, 1) as (other,):
        config = config_of(str(tmp_path), 1, pipeline_parallel_size=2, **over(port, 2), **OPTIONS)
        assert answers(config, {9: lambda _: other.fail()}) == alone


def test_prompts_with_a_common_beginning_find_its_blocks(tmp_path: Path) -> None:
    """In all stages, the blocks of layers with a window too."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma 4"]))
    common = (np.arange(40, dtype="<i4") + 7).tobytes()
    sent = [msgspec.structs.replace(one, prompt_token_ids=common + one.prompt_token_ids[:64]) for one in requests()]
    options = {**OPTIONS, "enable_prefix_caching": True}
    alone = answers(config_of(str(tmp_path), 1, **options), sent=sent)
    assert answers(config_of(str(tmp_path), 1, pipeline_parallel_size=3, **options), sent=sent) == alone


def test_more_stages_than_parts_are_refused_with_the_cuts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma 4"]))
    expected = "=4: the model can be cut before layers 1 to 2 only, as layers from 2 on share K and V: use at most 3"
    with pytest.raises(ConfigError, match=expected):
        load_executor(config_of(str(tmp_path), 1, pipeline_parallel_size=4))
    (tmp_path / "config.json").write_text(json.dumps(STREAMS))  # layers 2 and 3 read those of 0 and 1
    with pytest.raises(ConfigError, match="the model cannot be cut into stages, as layers from 0 on share K and V"):
        load_executor(config_of(str(tmp_path), 1, pipeline_parallel_size=2))
