"""Every in-tree architecture against transformers, from one safetensors file and from a sharded index.

Greedy float32 tokens are transformers', and the logits' error against its float64 run is at most twice its own float32
error. A setting that is wrong by one must be seen.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.architectures.by_name import ARCHITECTURES
from core.models.config import ExpertParts, StreamParts
from ipc.errors import UnsupportedModelError
from kernels.elements import FLOAT32
from tests.core.models.checkpoints import CASES, check_greedy, check_logits, golden, our_logits
from tests.core.models.gguf_checkpoints import write_model
from tests.numbers import dense_tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: Cases whose checkpoint is read from several files, too: of each way in which tensors become weights one.
SHARDED = ("llama2", "llama-biased-linear", "qwen3", "gemma3-scaled", "phi3", "mixtral", "granite-moe", "gpt-oss")


#: Cases that have no part of their own.
REPEATED = ("llama-mlp-bias",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.soak) if case in REPEATED else case for case in CASES]
)
def test_safetensors_give_what_transformers_gives(case: str, tmp_path: Path) -> None:
    expected = golden(case)
    for number, shard_size in enumerate(("1GB", "40KB") if case in SHARDED else ("1GB",)):
        folder = tmp_path / str(number)
        expected.model.save_pretrained(folder, max_shard_size=shard_size)
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size == "40KB")
        check_logits(folder, expected)
    check_greedy(folder, expected)


def test_mimo_is_a_qwen2_with_a_layer_that_is_not_read(tmp_path: Path) -> None:
    """transformers has no code of its own for MiMo, whose config class is Qwen2's."""
    expected = golden("qwen2")
    expected.model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**settings, **named}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.ones(48, 96)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).architecture == "MiMoForCausalLM"
    check_logits(tmp_path, expected)
    check_greedy(tmp_path, expected)


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    """Ernie's and EXAONE's names of them; a DeepSeek's has a layer's name, past the last one."""
    expected = golden("exaone-moe")
    expected.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    before = our_logits(tmp_path, expected.prompts[:1])[0]
    more = {
        name: torch.ones(3, 2) for name in ("mtp.fc.weight", "model.mtp_block.0.x.weight", "model.layers.4.y.weight")
    }
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert torch.equal(our_logits(tmp_path, expected.prompts[:1])[0], before)
    save_file(tensors | {"model.other.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor 'model\.other\.weight'"):
        our_logits(tmp_path, expected.prompts[:1])


def test_internlm2_is_a_llama_whose_rows_of_q_k_and_v_are_fused(tmp_path: Path) -> None:
    """transformers has no code for InternLM2, whose files have each KV head's queries, its K and its V together."""
    expected = golden("llama2")
    config, tensors = expected.model.config, {}
    expected.model.save_pretrained(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for theirs, ours in ARCHITECTURES["InternLM2ForCausalLM"].names.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    for layer in range(config.num_hidden_layers):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
        heads = [part.view(config.num_key_value_heads, -1, config.hidden_size) for part in parts]
        fused = torch.cat(heads, 1).reshape(-1, config.hidden_size)
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    named = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    (tmp_path / "config.json").write_text(json.dumps({**settings, **named}))
    for path in (tmp_path, write_model(tmp_path / "model.gguf", expected.model, "internlm2")):
        assert read_model_config(path).architecture == "InternLM2ForCausalLM"
        check_logits(path, expected)


def test_old_files_of_gpt2_have_no_prefix_and_causal_masks(tmp_path: Path) -> None:
    golden("gpt2").model.save_pretrained(tmp_path)
    config, path = read_model_config(tmp_path), tmp_path / "model.safetensors"
    expected = {name: dense_tensor(weight) for name, weight in load_weights(tmp_path, config, FLOAT32)}
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.zeros(1)}, path)
    found = {name: dense_tensor(weight) for name, weight in load_weights(tmp_path, config, FLOAT32)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


#: Case -> a field of its config and a wrong value: each must be seen, else the comparison above proves nothing of it.
WRONG: list[tuple[str, str, Any]] = [
    ("llama3", "rope_scaling", None),
    ("llama-biased-linear", "rope_scaling", None),
    ("mistral-sliding", "sliding_window", 130),
    ("mistral-sliding", "sliding_window", 132),
    ("mistral-sliding", "sliding_layers", (0, 1)),
    ("qwen2", "rope_scaling", None),
    ("qwen2-sliding", "sliding_layers", (1,)),
    ("gemma3", "sliding_window", 101),
    ("gemma3", "query_pre_attn_scalar", None),
    ("gemma3", "hidden_act", "silu"),
    ("gemma3", "scale_embeddings", False),
    ("gemma3", "norm_offset", 0.0),
    ("gemma3-scaled", "rope_scaling", None),
    ("gemma3n", "sparse_gates", ()),
    ("gemma3n", "streams", StreamParts(count=4, active=1, scales_active=True, rank=16)),
    ("gemma3n", "streams", StreamParts(count=4, active=0, scales_active=False, rank=16)),
    ("gemma4-e2b", "rope_scaling", None),
    ("gemma4-e2b", "value_norm", False),
    ("gemma4-e2b", "query_pre_attn_scalar", None),
    ("gemma4-e2b", "logits_cap", None),
    ("gemma4-31b", "sliding_window", 101),
    ("gemma3-scaled", "sliding_rope_theta", None),
    ("gemma2", "scores_cap", None),
    ("gemma2", "logits_cap", None),
    ("smollm3", "unrotated_layers", ()),
    ("gpt-oss", "hidden_act", "silu"),
    ("gpt-oss", "sliding_window", 101),
    ("granite", "embedding_multiplier", 1.0),
    ("granite", "residual_multiplier", 1.0),
    ("granite", "logits_multiplier", 1.0),
    ("llama4", "qk_norm", False),
    ("falcon-h1", "factors", ()),
    ("glm4", "rotary_dim", 8),
    ("exaone4", "unrotated_layers", ()),
    ("ministral3", "query_growth", None),
    ("deepseek-v2-lite", "query_pre_attn_scalar", 20.0),
    ("minicpm3", "residual_multiplier", 1.0),
    ("cohere", "logits_multiplier", 1.0),
    ("cohere2", "unrotated_layers", ()),
    ("cohere-head-norms", "rms_norm_eps", 1e-2),
    ("hunyuan-dense", "qk_norm_after", False),
    ("hunyuan-dense", "rope_theta", 1e4),
    ("nemotron", "hidden_act", "gelu"),
    ("nemotron", "norm_offset", 0.0),
    ("gpt-neox", "residual", "in turn"),
    ("gpt-neox-in-turn", "residual", "parallel"),
    ("starcoder2", "centred_norms", False),
    ("mixtral", "experts", ExpertParts(num_experts=4, num_chosen=2, intermediate_size=80, normalises=False)),
    ("mixtral", "experts", ExpertParts(num_experts=4, num_chosen=3, intermediate_size=80, normalises=True)),
]


#: Case -> a field of its experts and a wrong value.
WRONG_EXPERTS: list[tuple[str, str, Any]] = [
    ("qwen2-moe", "normalises", True),
    ("llama4", "scales_inputs", False),
    ("deepseek-v2", "num_chosen_groups", 4),
    ("deepseek-v2", "scaling", 1.0),
    ("deepseek-v3", "best_of_group", 1),
    ("deepseek-v3", "num_groups", 2),
    ("glm4.5-air", "is_sigmoid", False),
    ("dots1", "scaling", 1.0),
]


@pytest.mark.parametrize(("case", "field", "value"), WRONG_EXPERTS)
def test_a_wrong_setting_of_experts_is_seen(case: str, field: str, value: Any, tmp_path: Path) -> None:
    expected = golden(case)
    expected.model.save_pretrained(tmp_path)
    experts = read_model_config(tmp_path).experts
    assert experts is not None
    assert getattr(experts, field) != value
    wrong = msgspec.structs.replace(experts, **{field: value})
    logits = our_logits(tmp_path, expected.prompts[2:], experts=wrong)[0]
    assert (logits - expected.exact[2]).abs().max() > 100 * expected.errors[2].max()


@pytest.mark.parametrize(
    ("case", "field", "value"), WRONG, ids=[f"{case}: {field} {n}" for n, (case, field, _) in enumerate(WRONG)]
)
def test_a_wrong_setting_is_seen(case: str, field: str, value: Any, tmp_path: Path) -> None:
    expected = golden(case)
    expected.model.save_pretrained(tmp_path)
    assert getattr(read_model_config(tmp_path), field) != value
    logits = our_logits(tmp_path, expected.prompts[2:], **{field: value})[0]
    error = (logits - expected.exact[2]).abs()
    assert error.max() > 100 * expected.errors[2].max()


def test_alpha_is_a_factor_of_theta_in_a_dynamic_scaling_only(tmp_path: Path) -> None:
    """Transformers does not read it with others."""
    golden("hunyuan-dense").model.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings, thetas = json.loads(path.read_text()), []
    for kind in ("dynamic", "linear", "default"):
        settings["rope_parameters"]["rope_type"] = kind
        path.write_text(json.dumps(settings))
        thetas.append(read_model_config(tmp_path).rope_theta)
    assert thetas == [pytest.approx(1e4 * 128 ** (16 / 14)), 1e4, 1e4]
