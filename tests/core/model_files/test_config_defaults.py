"""What config.json leaves out, and what of it may not be passed over, as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.model_files.model_config import read_model_config
from core.models.layers.rope_scaling import LinearScaling, YarnScaling
from ipc.errors import UnsupportedModelError
from tests.core.model_files.test_config_architectures import SIZES, read

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

_FEW = {"num_local_experts": 8, "num_experts_per_tok": 2}
#: Of each architecture, settings whose absence means what transformers' own config class has -> where ours have it.
DEFAULTS = [
    ("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1}),
    ("gpt_oss", {**_FEW, "rope_theta": 12_345.0}),
    ("gpt_oss", {**_FEW, "rope_scaling": None}),
    ("gpt_oss", {**_FEW, "rope_parameters": None}),
    ("ministral3", {}),
]


@pytest.mark.parametrize(("model_type", "settings"), DEFAULTS)
def test_what_a_file_leaves_out_is_as_in_transformers(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"max_position_embeddings": 262_144, "moe_intermediate_size": 32, **settings}
    ours = read(tmp_path, model_type=model_type, **settings)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    if (own := theirs.rope_parameters)["rope_type"] == "yarn":
        assert isinstance(ours.rope_scaling, YarnScaling)
        _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        assert ours.rope_scaling == YarnScaling(
            own["factor"], own["original_max_position_embeddings"], factor, 32.0, 1.0, own.get("truncate", True)
        )
    else:
        assert ours.experts is not None
        assert ours.experts.scaling == theirs.routed_scaling_factor
        assert ours.experts.shared_size == 32 * theirs.n_shared_experts
    assert ours.query_growth == own.get("llama_4_scaling_beta")


def test_a_rotary_scaling_replaces_the_one_of_the_architecture(tmp_path: Path) -> None:
    linear = read(tmp_path, model_type="gpt_oss", **_FEW, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert linear.rope_scaling == LinearScaling(2.0)
    plain = read(tmp_path, model_type="gpt_oss", **_FEW, rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert (plain.rope_scaling, plain.rope_theta) == (None, 5.0)


def test_an_mlp_size_that_qwen3_next_leaves_out(tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": "qwen3_next"}))
    assert read_model_config(tmp_path).intermediate_size == AutoConfig.from_pretrained(tmp_path).intermediate_size


@pytest.mark.parametrize("model_type", ["llama", "bert", "gemma3"])
def test_settings_of_single_layers_are_refused(model_type: str, tmp_path: Path) -> None:
    own = {"per_layer_config": {"1": {"sliding_window": 4, "rms_norm_eps": 0.5}}}
    plain: dict[str, Any] = {"llama": {"model_type": "llama"}, "bert": {"model_type": "bert", "hidden_act": "gelu"}}
    text = {**SIZES, "model_type": "gemma3_text", **own}
    images = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(UnsupportedModelError, match=r"per_layer_config=.* is not supported; all layers must have"):
        read(tmp_path, **(images if model_type == "gemma3" else {**plain[model_type], **own}))


def test_what_transformers_read_from_a_gguf_file_is_plain(tmp_path: Path) -> None:
    settings = {"model_type": "llama", "quantization_config": {"quant_method": "gguf", "modules_to_not_convert": None}}
    assert read(tmp_path, **settings).packing == "none"


def test_the_quantization_of_a_whole_model_with_images_is_its_texts(tmp_path: Path) -> None:
    text = {**SIZES, "model_type": "gemma3_text", "head_dim": 16}
    with pytest.raises(UnsupportedModelError, match=r"quantization_config\.quant_method='hqq' is not"):
        read(
            tmp_path,
            architectures=["Gemma3ForConditionalGeneration"],
            text_config=text,
            quantization_config={"quant_method": "hqq"},
        )
