"""Gemma 4: what its files say of single layers, K and V that layers share, and inputs of single layers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.config import HeadSizes
from core.models.llama import Llama
from ipc.errors import ModelFileError, UnsupportedModelError
from kernels.cpu.library import load_cpu_library
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.models.checkpoints import check_logits, golden, our_logits
from tests.core.models.gguf_checkpoints import write, write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

E2B, LARGE, ROUTED = "gemma4-e2b", "gemma4-31b", "gemma4-26b-a4b"


def saved(case: str, folder: Path, **changed: Any) -> dict[str, Any]:
    """Save a checkpoint's config with other settings, of which None leaves one out; return the settings."""
    golden(case).model.config.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changed
    settings = {name: value for name, value in settings.items() if name not in changed or value is not None}
    path.write_text(json.dumps(settings))
    return settings


def test_older_files_name_the_heads_of_layers_without_a_window(tmp_path: Path) -> None:
    for case, own in (
        (E2B, {"global_head_dim": 32}),
        (LARGE, {"global_head_dim": 32, "num_global_key_value_heads": 1}),
    ):
        saved(case, tmp_path)
        expected = read_model_config(tmp_path)
        saved(case, tmp_path, per_layer_config=None, **own)
        assert read_model_config(tmp_path) == expected
        saved(case, tmp_path, per_layer_config=None)
        assert read_model_config(tmp_path).full_heads == HeadSizes(2, 512)  # transformers' default


def test_numbers_of_layers_may_have_zeros_in_front(tmp_path: Path) -> None:
    settings = saved(LARGE, tmp_path)
    expected = read_model_config(tmp_path)
    assert expected.full_heads == HeadSizes(1, 32)
    own = {f"0{number}": group for number, group in settings["per_layer_config"].items()}
    saved(LARGE, tmp_path, per_layer_config=own)
    assert read_model_config(tmp_path) == expected
    saved(LARGE, tmp_path, per_layer_config={})
    assert read_model_config(tmp_path).full_heads is None


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        LARGE,
        {"per_layer_config": {"01": {"intermediate_size": 9}}},
        "per_layer_config.01.intermediate_size=9 is not su",
    ),
    (LARGE, {"per_layer_config": {"1": {"head_dim": 32}}}, "only heads of layers without a window may be others"),
    (LARGE, {"per_layer_config": {"0": {"head_dim": 32}}}, "only heads of layers without a window may be others"),
    (E2B, {"hidden_activation": "silu"}, "layers with inputs of their own only 'gelu_pytorch_tanh' is"),
    (E2B, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
    (E2B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported; only null is"),
]
SENSELESS: list[tuple[str, dict[str, Any], str]] = [
    (
        LARGE,
        {"per_layer_config": {"9": {}}},
        "per_layer_config.9 must be the settings of one of 4 layers, by its number",
    ),
    (LARGE, {"per_layer_config": {"1": 3}}, "per_layer_config.1 must be an object"),
    (LARGE, {"per_layer_config": {"1": {}, "01": {}}}, "per_layer_config.01 must be the settings of one of 4 layers"),
    (E2B, {"num_kv_shared_layers": 5}, "num_kv_shared_layers must leave a layer with K and V of each kind; got 5"),
    (E2B, {"num_kv_shared_layers": 7}, "num_kv_shared_layers must leave a layer with K and V of each kind; got 7"),
    (E2B, {"vocab_size_per_layer_input": 299}, "vocab_size_per_layer_input must be at least vocab_size; got 299"),
    (
        LARGE,
        {"per_layer_config": None, "num_global_key_value_heads": 3},
        "num_attention_heads must be a multiple of the",
    ),
]


@pytest.mark.parametrize(("case", "changed", "message"), [*REFUSED, *SENSELESS])
def test_what_does_not_run_is_refused_by_name(case: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(case, tmp_path, **changed)
    error = UnsupportedModelError if (case, changed, message) in REFUSED else ModelFileError
    with pytest.raises(error, match=re.escape(message)):
        read_model_config(tmp_path)


def test_only_layers_of_other_architectures_must_be_alike(tmp_path: Path) -> None:
    golden("llama2").model.config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "per_layer_config": {"0": {"head_dim": 8}}}))
    with pytest.raises(UnsupportedModelError, match="all layers must have the settings of the whole model"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_matrices_that_layers_without_k_and_v_do_not_need_are_left_aside(form: str, tmp_path: Path) -> None:
    """Published files have them, and transformers and llama.cpp do not read them."""
    expected, path = golden(E2B), tmp_path
    more = {"k_proj": (32, 48), "v_proj": (32, 48), "k_norm": (16,)}
    if form == "gguf":
        names = {"k_proj": "attn_k", "v_proj": "attn_v", "k_norm": "attn_k_norm"}
        unused = {f"blk.3.{names[name]}.weight": torch.ones(shape) for name, shape in more.items()}
        path = write_model(tmp_path / "model.gguf", expected.model, "gemma4", changed=lambda tensors: tensors | unused)
    else:
        expected.model.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        unused = {f"model.layers.3.self_attn.{name}.weight": torch.ones(shape) for name, shape in more.items()}
        save_file(tensors | unused, path / "model.safetensors")
    check_logits(path, expected)
    if form == "safetensors":
        save_file(tensors | {"model.layers.3.self_attn.sinks": torch.ones(4)}, path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=r"unexpected tensor 'model\.layers\.3\.self_attn\.sinks"):
            our_logits(path, expected.prompts[:1])


def test_a_gguf_file_says_what_a_folder_says(tmp_path: Path) -> None:
    for case in (E2B, LARGE, ROUTED):
        saved(case, tmp_path)
        ours, theirs = read_model_config(write(tmp_path / "m.gguf", case, golden(case))), read_model_config(tmp_path)
        for name in ("full_heads", "full_keys_are_values", "num_shared_layers", "wide_mlps", "per_layer", "experts"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("rope_scaling", "sliding_layers", "sliding_rope_theta", "logits_cap", "intermediate_size"):
            assert getattr(ours, name) == getattr(theirs, name), name


def test_the_matrices_of_gate_and_up_of_all_experts_may_be_one_or_two(tmp_path: Path) -> None:
    def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = dict(tensors)
        for name in tensors:
            if "ffn_gate_up_exps" in name:
                gate, up = kept.pop(name).chunk(2, 1)
                kept |= {
                    name.replace("gate_up", "gate"): gate.contiguous(),
                    name.replace("gate_up", "up"): up.contiguous(),
                }
        assert len(kept) == len(tensors) + 4
        return kept

    expected = golden(ROUTED)
    one, two = write(tmp_path / "one.gguf", ROUTED, expected), tmp_path / "two.gguf"
    write_model(two, expected.model, "gemma4", changed=apart)
    logits = [our_logits(path, expected.prompts[:1])[0] for path in (one, two)]
    assert torch.equal(*logits)


def opened(case: str, folder: Path, dtype: Any = FLOAT32) -> Llama:
    golden(case).model.save_pretrained(folder)
    config = read_model_config(folder)
    return Llama(config, load_weights(folder, config, dtype), dtype, library=load_cpu_library())


def test_k_and_v_of_layers_that_share_them_are_stored_once(tmp_path: Path) -> None:
    model = opened(E2B, tmp_path, BFLOAT16)
    # Of 6 layers the first three have K and V: two of 2 heads of 16 numbers, one of 2 heads of 32.
    assert model.bytes_per_block(16) == 16 * 2 * 2 * (2 * 2 * 16 + 2 * 32)
    assert [layer.mixer.place for layer in model.layers] == [0, 1, 2, 2, 1, 1]
    assert len(model.allocate_cache(3, 16).layers) == 3


def test_the_table_of_inputs_stays_in_the_file(tmp_path: Path) -> None:
    """It is larger than all other weights of the small models; a step reads a few of its rows."""
    model = opened(E2B, tmp_path)
    owner: Any = model.per_layer.table.table  # type: ignore[union-attr]
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert type(owner.obj if isinstance(owner, memoryview) else owner).__name__ == "mmap"
