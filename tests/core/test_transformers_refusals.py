"""The generic path refuses, and says why, what it would run wrongly."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from core.executor.local import LocalExecutor
from core.models.transformers_model import TransformersModel
from ipc.errors import ModelFileError, UnsupportedModelError
from tests.core.test_transformers_model import SIZES, VOCAB, config_for, save

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": VOCAB, "n_positions": 256}
#: model_type, its settings, what the refusal says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("falcon", SIZES, "its code does not use transformers' attention interface"),
    ("gptj", GPT, "its code does not use transformers' attention interface"),
    ("codegen", GPT, "^CodeGenForCausalLM: 0 of 2 layers use .* compute attention by themselves"),
    ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}, "^BloomForCausalLM: 0 of 2 layers"),
    ("mamba", {**SIZES, "state_size": 4}, "^MambaForCausalLM: 0 of 2 layers use .* kind \\(state space,"),
    (
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB},
        "^MptForCausalLM: its code does not run",
    ),
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
    with pytest.raises(UnsupportedModelError, match=reason):
        TransformersModel(tmp_path, torch.float32)


def test_attention_that_ours_does_not_know_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: the model's own attention scales its queries, and tells nobody."""
    from transformers.models.olmo2 import modeling_olmo2

    save("olmo2", tmp_path)
    eager = modeling_olmo2.eager_attention_forward
    monkeypatch.setattr(
        modeling_olmo2,
        "eager_attention_forward",
        lambda module, query, *rest, **more: eager(module, 1.1 * query, *rest, **more),
    )
    with pytest.raises(UnsupportedModelError, match=r"^Olmo2ForCausalLM: .* off by [\d.]+% .*at most 0.1% is rounding"):
        TransformersModel(tmp_path, torch.float32)


def test_requests_that_see_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: every token is mixed with the one before it, whosever that is."""
    from transformers.models.olmo2 import modeling_olmo2

    save("olmo2", tmp_path)
    forward = modeling_olmo2.Olmo2MLP.forward

    def mixing(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = forward(self, hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])
        return mixed

    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", mixing)
    with pytest.raises(UnsupportedModelError, match=r"two requests in one batch change each other's logits by [\d.]+%"):
        TransformersModel(tmp_path, torch.float32)


def test_native_only_refuses_other_architectures(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        LocalExecutor(config_for(tmp_path, model_impl="native"))


def test_a_missing_weight_file_is_a_model_file_error(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        LocalExecutor(config_for(tmp_path))


def test_transformers_missing_names_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelFileError, match=r"engine-core\[transformers\]"):
        TransformersModel(tmp_path, torch.float32)
