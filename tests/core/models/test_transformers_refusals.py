"""The generic path refuses, and says why, what it would run wrongly."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from core.executors.local import LocalExecutor
from core.model_files.loading import load_model
from core.model_files.model_config import MISSING_PARTS
from core.models.transformers.transformers_model import TransformersModel
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from kernels.elements import FLOAT32
from tests.core.models.transformers.test_transformers_model import GPT, GPTJ_RUNS, SIZES, VOCAB, config_for, save

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

BART = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 1, "vocab_size": VOCAB}
WHISPER = {
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "max_target_positions": 99,
    "pad_token_id": 0,
}
#: model_type, its settings, what the refusal says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("falcon", SIZES, "its code does not use transformers' attention interface"),
    *(
        (
            ("gptj", GPT, "its code does not use transformers' attention interface"),
            ("codegen", GPT, "^CodeGenForCausalLM: 0 of 2 layers use .* compute attention themselves"),
        )
        if not GPTJ_RUNS
        else ()
    ),
    ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}, "^BloomForCausalLM: 0 of 2 layers"),
    ("mamba", {**SIZES, "state_size": 4}, "^MambaForCausalLM: 0 of 2 layers use .* kind \\(state space,"),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}, "^MptForCausalLM: 0 of 2 layers"),
    ("stablelm", {**SIZES, "num_key_value_heads": 32}, "^StableLmForCausalLM: 4 query heads cannot share 32 KV heads"),
    ("bart", BART, "^BartForCausalLM: its code takes no position_ids"),
    ("diffllama", {**SIZES, "num_key_value_heads": 2}, "^DiffLlamaAttention: layer 0 calls attention more than once"),
    ("doge", {**SIZES, "num_key_value_heads": 2}, "^DogeAttention: layer 0 makes its own attention mask"),
    (
        "bert",
        SIZES,
        "^BertLMHeadModel: the mask of layer 0 shows 256 tokens to the one at position 0, but .*=None\\) shows 1",
    ),
    (
        "phimoe",
        {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 200},
        "^PhimoeForCausalLM: the mask of layer 0 shows 200 tokens to the one at position 255, but .*=None\\) shows 256",
    ),
    ("whisper", WHISPER, "^WhisperForCausalLM: its code does not run up to position 255 .*: set max_model_len to"),
    ("llama4_text", {**SIZES, "head_dim": 16}, "^Llama4ForCausalLM: its layers and its head are not apart"),
    ("gemma2", {**SIZES, "num_key_value_heads": 2, "head_dim": 16}, "Gemma2Attention: softcap is not supported"),
    (
        "gpt_oss",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4},
        "GptOssAttention: s_aux is not supported",
    ),
]


@pytest.mark.parametrize(("model_type", "settings", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_would_run_wrongly_is_refused(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(model_type, tmp_path, **settings)
    with pytest.raises(
        UnsupportedModelError, match=f"{reason}.*; supported are LlamaForCausalLM, .* and transformers models"
    ):
        TransformersModel(tmp_path, FLOAT32)


#: What is changed in config.json, what is said.
WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str"),
    ({"num_attention_heads": 0}, "transformers cannot load it: ZeroDivisionError in modeling_olmo2.py, line"),
    ({"hidden_act": "no_such"}, "transformers cannot load it: KeyError in activations.py, line .*'no_such'"),
    ({"vocab_size": 299}, r"lm_head.weight has the shape \[300, 64\]; by its config.json it is \[299, 64\]"),
    ({"num_hidden_layers": 3}, r"no file has model.layers.2\..* and 10 more weights, which its config.json requires"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG_CONFIGS, ids=[str(*row[0]) for row in WRONG_CONFIGS])
def test_a_config_that_does_not_fit_is_a_model_file_error(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Weights that are missing among them: transformers would make them up."""
    save("olmo2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with pytest.raises(ModelFileError, match=f"(?s){tmp_path}: .*{text}"):
        LocalExecutor(config_for(tmp_path))


@pytest.mark.parametrize("settings", [{"quant_method": "other"}, {"bits": 4}])
def test_an_unknown_quantization_beside_plain_weights_is_refused_by_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """transformers warns and passes it over."""
    save("olmo2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    with pytest.raises(
        (ModelFileError, UnsupportedModelError),
        match=r"quantization_config.* is none of transformers'|transformers cannot load it",
    ):
        TransformersModel(tmp_path, FLOAT32, made_up=False)


def test_a_kind_that_nobody_has_is_refused_without_the_advice_to_upgrade(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "foo", "architectures": ["FooForCausalLM"]}')
    with pytest.raises(
        UnsupportedModelError, match=r"\['FooForCausalLM'\]: neither this engine nor transformers 5"
    ) as e:
        TransformersModel(tmp_path, FLOAT32)
    assert "pip" not in str(e.value)


def test_code_of_the_model_s_folder_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")  # as a user might who is asked
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match="custom code"):
        TransformersModel(tmp_path, FLOAT32, made_up=True)
    assert not (tmp_path / "ran").exists()


def test_damaged_weights_are_a_model_file_error(tmp_path: Path) -> None:
    save("olmo2", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ModelFileError, match=r"SafetensorError .*header"):
        LocalExecutor(config_for(tmp_path))


def test_native_only_refuses_other_architectures(tmp_path: Path) -> None:
    save("opt", tmp_path)
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM"):
        LocalExecutor(config_for(tmp_path, model_impl="native"))


def test_a_missing_weight_file_is_a_model_file_error(tmp_path: Path) -> None:
    save("opt", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        LocalExecutor(config_for(tmp_path))


def test_bitnets_published_files_are_refused_by_what_they_need(tmp_path: Path) -> None:
    save("bitnet", tmp_path, num_key_value_heads=2)
    settings = json.loads((tmp_path / "config.json").read_text())
    own = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": own}))
    with pytest.raises(UnsupportedModelError, match="needs products of ternary weights with activations of 8 bits"):
        LocalExecutor(config_for(tmp_path))


def test_transformers_missing_names_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelFileError, match=r"with its extra \[transformers\]"):
        TransformersModel(tmp_path, FLOAT32)


@pytest.fixture(scope="module")
def known() -> frozenset[str]:
    """Names that transformers has. It needs 0.3 s to list them."""
    import transformers

    return frozenset(dir(transformers))


@pytest.mark.parametrize("name", MISSING_PARTS)
def test_what_runs_in_neither_way_is_refused_by_the_name_of_what_it_needs(
    name: str, known: frozenset[str], tmp_path: Path
) -> None:
    assert name in known
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    text = f"{name} needs {MISSING_PARTS[name]}, which this version does not have"
    with pytest.raises(UnsupportedModelError, match=re.escape(text)):
        load_model(tmp_path, FLOAT32, EngineConfig())
