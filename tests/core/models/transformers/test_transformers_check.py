"""The start-up check of the generic path refuses code that would go wrong in a step, and says what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3

from core.models.transformers.transformers_model import TransformersModel
from ipc.errors import UnsupportedModelError
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.models.transformers.test_transformers_model import SIZES, save

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports


def test_attention_that_ours_does_not_know_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: the model's own attention scales its queries, and tells nobody."""
    save("olmo2", tmp_path)
    eager = modeling_olmo2.eager_attention_forward
    monkeypatch.setattr(
        modeling_olmo2,
        "eager_attention_forward",
        lambda module, query, *rest, **more: eager(module, 1.1 * query, *rest, **more),
    )
    with pytest.raises(UnsupportedModelError, match=r"^Olmo2ForCausalLM: .* off by [\d.]+% .*at most 0.1% is rounding"):
        TransformersModel(tmp_path, FLOAT32)


def test_attention_that_differs_beyond_the_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: the model's own attention is another one from position 40 on, and its window is 40 tokens."""
    save("phi3", tmp_path, sliding_window=40)
    eager = modeling_phi3.eager_attention_forward

    def differing(module: Any, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return eager(module, torch.cat((query[:, :, :40], 1.1 * query[:, :, 40:]), 2), *rest, **more)

    monkeypatch.setattr(modeling_phi3, "eager_attention_forward", differing)
    with pytest.raises(UnsupportedModelError, match=r"^Phi3ForCausalLM: .* off by [\d.]+% .*at most 0.1% is rounding"):
        TransformersModel(tmp_path, FLOAT32)


def test_a_mask_that_differs_beyond_what_is_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: the layers do not hand on the window that the model's masks have, and it is wider than any prompt tried."""
    save("phi3", tmp_path, sliding_window=150)
    forward = modeling_phi3.Phi3Attention.forward

    def forgetting(self: Any, *rest: Any, **more: Any) -> Any:
        self.config.sliding_window = None
        try:
            return forward(self, *rest, **more)
        finally:
            self.config.sliding_window = 150

    TransformersModel(tmp_path, FLOAT32)
    monkeypatch.setattr(modeling_phi3.Phi3Attention, "forward", forgetting)
    with pytest.raises(UnsupportedModelError, match="mask of layer 0 shows 150 tokens to the one at position 255"):
        TransformersModel(tmp_path, FLOAT32)
    TransformersModel(tmp_path, FLOAT32, max_model_len=150)  # up to there it makes no difference


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_state_beside_keys_and_values_is_refused_however_small(dtype: Dtype, tmp_path: Path) -> None:
    """Falcon-H1's state space with random weights changes the logits by less than rounding to bfloat16 does."""
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
    save("falcon_h1", tmp_path, **SIZES, **mamba, num_key_value_heads=2)
    with pytest.raises(UnsupportedModelError, match=r"^FalconH1ForCausalLM: a token reaches others without attention"):
        TransformersModel(tmp_path, dtype, made_up=True)


def test_tokens_that_see_each_other_beside_attention_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: every token is mixed with the one before it, whosever that is."""
    save("olmo2", tmp_path)
    forward = modeling_olmo2.Olmo2MLP.forward

    def mixing(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = forward(self, hidden + 1e-6 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])
        return mixed

    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", mixing)
    with pytest.raises(UnsupportedModelError, match=r"^Olmo2ForCausalLM: a token reaches others without attention"):
        TransformersModel(tmp_path, FLOAT32)


def test_weights_that_are_no_numbers_are_told_from_that(tmp_path: Path) -> None:
    model = save("olmo2", tmp_path)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"^Olmo2ForCausalLM: its logits are NaN;"):
        TransformersModel(tmp_path, FLOAT32)


def test_code_that_goes_by_the_largest_position_in_the_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("olmo2", tmp_path)
    forward = modeling_olmo2.Olmo2RotaryEmbedding.forward

    def by_length(self: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cosines, sines = forward(self, hidden, position_ids)
        scale = 1.1 if int(position_ids.max()) >= 100 else 1.0
        return scale * cosines, scale * sines

    monkeypatch.setattr(modeling_olmo2.Olmo2RotaryEmbedding, "forward", by_length)
    with pytest.raises(UnsupportedModelError, match=r"two requests in one batch change each other's logits by [\d.]+%"):
        TransformersModel(tmp_path, FLOAT32)
    TransformersModel(tmp_path, FLOAT32, max_model_len=100)


def test_code_that_is_right_for_whole_prompts_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: a decode step, of one token, is another model than a prompt's."""
    save("olmo2", tmp_path)
    forward = modeling_olmo2.Olmo2MLP.forward

    def by_count(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(self, hidden + (0.5 if hidden.shape[1] < 5 else 0.0))
        return result

    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", by_count)
    with pytest.raises(UnsupportedModelError, match=r"after a second step its logits are off by [\d.]+% of"):
        TransformersModel(tmp_path, FLOAT32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("twice", "Olmo2Attention: layer 0 calls attention more than once in a forward pass"),
        ("never", "Olmo2ForCausalLM: 0 of 2 layers called attention in this step"),
        ("mask", "Olmo2Attention: layer 0 makes its own attention mask"),
    ],
)
def test_what_the_trial_has_not_shown_is_refused_in_a_step(
    change: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: layers that attend as they should over the trial's 4 tokens."""
    save("olmo2", tmp_path)
    forward = modeling_olmo2.Olmo2Attention.forward

    def changing(self: Any, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if hidden_states.shape[1] == 4:
            return forward(self, hidden_states, *rest, **more)
        if change == "never":
            return hidden_states, None
        if change == "mask":
            more["attention_mask"] = torch.zeros(())
        else:
            forward(self, hidden_states, *rest, **more)
        return forward(self, hidden_states, *rest, **more)

    monkeypatch.setattr(modeling_olmo2.Olmo2Attention, "forward", changing)
    with pytest.raises(UnsupportedModelError, match=reason):
        TransformersModel(tmp_path, FLOAT32)
