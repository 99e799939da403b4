"""ModelConfig from config.json and from GGUF metadata."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from core.model_files.model_config import ModelConfig, read_model_config
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.model_files import resolve_model

#: SmolLM2's config.json as transformers 4 wrote it, with other numbers.
PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}
EXPECTED = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=50_000.0,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="bfloat16",
)


def read_json(folder: Path, config: Any, generation: Any = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def changed(config: ModelConfig, **fields: Any) -> ModelConfig:
    return ModelConfig(**{**{name: getattr(config, name) for name in config.__struct_fields__}, **fields})


# --- config.json --------------------------------------------------------------------------------------------------


def test_config_json_of_transformers_4(tmp_path: Path) -> None:
    assert read_json(tmp_path, PLAIN) == EXPECTED


def test_config_json_of_transformers_5(tmp_path: Path) -> None:
    written = LlamaConfig(
        **{name: value for name, value in PLAIN.items() if not name.startswith(("rope", "torch"))},
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        dtype="bfloat16",
    )
    written.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in text
    assert text["rope_parameters"]["rope_theta"] == 50_000.0
    assert read_model_config(tmp_path) == EXPECTED


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    dropped = ("num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype", "hidden_act")
    config = {name: value for name, value in PLAIN.items() if name not in (*dropped, "architectures")}
    expected = LlamaConfig(**config)
    assert read_json(tmp_path, config) == changed(
        EXPECTED,
        num_key_value_heads=expected.num_key_value_heads,
        head_dim=expected.head_dim,
        rope_theta=(expected.rope_parameters or {})["rope_theta"],
        tie_word_embeddings=expected.tie_word_embeddings,
        dtype="float32",
    )


def test_head_dim_may_differ_from_the_quotient(tmp_path: Path) -> None:
    config = read_json(tmp_path, PLAIN | {"head_dim": 32, "hidden_size": 66})
    assert (config.head_dim, config.hidden_size) == (32, 66)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": 2}, (2,)),
        (2, {"eos_token_id": [7, 2, 5]}, (2, 7, 5)),
        ([3, 4], {}, (3, 4)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids_of_both_files_are_merged(in_config: Any, in_generation: Any, expected: Any, tmp_path: Path) -> None:
    assert read_json(tmp_path, PLAIN | {"eos_token_id": in_config}, in_generation).eos_token_ids == expected


@pytest.mark.parametrize(
    "edit",
    [
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": ["LlamaForTokenClassification"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": []},
        {"use_bias": True},
        {"hidden_act": "gelu"},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": None}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"quant_method": "hqq"}},
    ],
)
def test_what_is_not_supported_is_refused_by_name(edit: dict[str, Any], tmp_path: Path) -> None:
    (name,) = edit
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {name}(\.\w+)?=.* is not supported; "):
        read_json(tmp_path, PLAIN | edit)


def test_another_model_type_without_architectures(tmp_path: Path) -> None:
    config = {name: value for name, value in PLAIN.items() if name != "architectures"}
    with pytest.raises(UnsupportedModelError, match=r"model_type='opt' .* supported are LlamaForCausalLM"):
        read_json(tmp_path, config | {"model_type": "opt"})
    del config["model_type"]
    with pytest.raises(ModelFileError, match="architectures is missing"):
        read_json(tmp_path, config)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_missing_and_senseless_numbers_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=rf"{name} is missing"):
        read_json(tmp_path, {key: value for key, value in PLAIN.items() if key != name})
    senseless: list[Any] = [0, -1, 10**12, 10**400, "12", True, [4], {}, float("nan"), float("inf")]
    for value in senseless:
        with pytest.raises(ModelFileError, match=rf"{name} must be"):
            read_json(tmp_path, PLAIN | {name: value})
    if name != "rms_norm_eps":
        with pytest.raises(ModelFileError, match=rf"{name} must be an integer"):
            read_json(tmp_path, PLAIN | {name: 64.0})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=4, got 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer from 1"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must divide num_attention_heads=4, got 8"),
        ({"hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads=4: 66"),
        ({"hidden_size": 12}, "head_dim must be even, for rotary embedding; got 3"),
        ({"head_dim": 0}, "head_dim must be an integer from 2"),
        ({"rope_theta": 0}, "rope_theta must be a number"),
        ({"rope_theta": "10000"}, "rope_theta must be a number"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a number"),
        ({"rope_parameters": 10_000}, "rope_parameters must be an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"eos_token_id": 1000}, "eos_token_id must be token ids below vocab_size=1000, got 1000"),
        ({"eos_token_id": [2, -1]}, "eos_token_id must be token ids below"),
        ({"bos_token_id": "1"}, "bos_token_id must be token ids below"),
        ({"torch_dtype": "float64"}, "dtype must be float32, float16 or bfloat16"),
    ],
)
def test_contradictions_are_named(edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_json(tmp_path, PLAIN | edit)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", '{"a":' * 100_000])
def test_a_file_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_model_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "x"]), inner)
    ),
    max_leaves=4,
)


@settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(edit=st.dictionaries(st.sampled_from([*PLAIN, "rope_parameters", "head_dim", "dtype"]), JSON, min_size=1))
def test_any_values_give_a_config_or_a_model_file_error(
    edit: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    try:
        config = read_json(folder, PLAIN | edit)
    except ModelFileError:
        return
    assert config.num_attention_heads % config.num_key_value_heads == 0


# --- GGUF ---------------------------------------------------------------------------------------------------------


def write_gguf(
    path: Path, *, edit: dict[str, Any] | None = None, architecture: str = "llama", tensors: tuple[str, ...] = ()
) -> Path:
    """A file without weights; `edit` sets integers, floats, strings or lists, or drops keys with None."""
    values: dict[str, Any] = {
        "llama.block_count": 3,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 50_000.0,
        "llama.attention.layer_norm_rms_epsilon": 0.0009765625,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 1000,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | (edit or {})
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, kinds[type(value)])
    for name in tensors:
        writer.add_tensor(name, np.zeros(4, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_EXPECTED = changed(EXPECTED, rms_norm_eps=0.0009765625, dtype="float32")


def test_the_demo_model() -> None:
    assert read_model_config(resolve_model(None)) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=100_000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2, 0),
        dtype="float32",
    )


@pytest.mark.parametrize(
    ("edit", "tensors", "fields"),
    [
        ({}, (), {}),
        ({"llama.attention.head_count_kv": None}, (), {"num_key_value_heads": 4}),
        ({"llama.rope.freq_base": None}, (), {"rope_theta": 10_000.0}),
        ({"llama.rope.dimension_count": None}, (), {}),
        ({"llama.rope.scaling.type": "none"}, (), {}),
        ({"llama.attention.key_length": 32, "llama.rope.dimension_count": 32}, (), {"head_dim": 32}),
        ({"llama.vocab_size": None, "tokenizer.ggml.tokens": ["a", "b", "c"]}, (), {"vocab_size": 3}),
        ({"tokenizer.ggml.eot_token_id": 7}, (), {"eos_token_ids": (2, 7)}),
        ({"tokenizer.ggml.eot_token_id": 2}, (), {"eos_token_ids": (2,)}),
        ({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}, (), {"eos_token_ids": (2, 7, 5)}),
        (
            {
                "llama.vocab_size": None,
                "tokenizer.ggml.tokens": ["a", "<s>", "</s>", "<|im_end|>"],
                "tokenizer.ggml.token_type": [1, 3, 3, 3],
            },
            (),
            {"vocab_size": 4, "eos_token_ids": (2, 3)},
        ),
        (
            {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": None},
            (),
            {"eos_token_ids": (), "bos_token_id": None},
        ),
        ({}, ("output.weight",), {"tie_word_embeddings": False}),
        ({}, ("blk.0.attn_q.weight",), {"dtype": "float16"}),
    ],
)
def test_gguf_metadata(edit: dict[str, Any], tensors: tuple[str, ...], fields: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", edit=edit, tensors=tensors)
    assert read_model_config(path) == changed(GGUF_EXPECTED, **fields)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope' is not supported; 'none', "),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear=2.0 is not supported"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor=0.5 is not supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window=4096 is not supported; in a GGUF"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping=30.0 is not supported"),
        (
            {"llama.rope.dimension_count": 8},
            "llama.rope.dimension_count=8 is not supported; only the head dimension 16",
        ),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8 is not supported"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, r"head_count_kv=\[2, 1, 2\] .* all layers must be alike"),
    ],
)
def test_gguf_features_are_refused_by_name(edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(write_gguf(tmp_path / "m.gguf", edit=edit))


def test_gguf_of_another_architecture_or_with_divisors_of_another_type(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture='mamba' .* supported are 'llama', 'qwen2'"):
        read_model_config(write_gguf(tmp_path / "a.gguf", architecture="mamba"))
    with pytest.raises(
        UnsupportedModelError, match=r"tensor rope_freqs\.weight of type F16 and shape \(4,\) .* \(8,\)"
    ):
        read_model_config(write_gguf(tmp_path / "b.gguf", tensors=("rope_freqs.weight",)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count must be an integer from 1"),
        ({"llama.embedding_length": 66}, "llama.embedding_length must be a multiple of llama.attention.head_count=4"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv must divide llama.attention.head_count=4, got 3"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon must be a number"),
        ({"llama.vocab_size": None}, "llama.vocab_size is missing"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "tokenizer.ggml.eos_token_id must be token ids below"),
    ],
)
def test_gguf_keys_are_named_as_in_the_file(edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_model_config(write_gguf(tmp_path / "m.gguf", edit=edit))
