"""Gemma 3n: what its files say of streams and sparse gates, its text in a whole checkpoint, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.executors.local import LocalExecutor
from core.model_files.model_config import read_model_config
from core.models.config import StreamParts
from ipc.errors import ConfigError, ModelFileError, UnsupportedModelError
from tests.core.executors.test_draft_head import GREEDY, config_of, run
from tests.core.models.checkpoints import golden, our_logits
from tests.core.models.gguf_checkpoints import write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

CASE = "gemma3n"


def saved(folder: Path, **changed: Any) -> Path:
    golden(CASE).model.config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


def test_settings(tmp_path: Path) -> None:
    config = read_model_config(saved(tmp_path))
    assert config.streams == StreamParts(count=4, active=0, scales_active=True, rank=16)
    assert np.allclose([one or 0 for one in config.sparse_gates], [1.2815516, 0, 0, 1.6448536, 0, 0])
    assert [one is None for one in config.sparse_gates] == [False, False, True, False, True, True]
    assert config.per_layer is not None
    assert config.per_layer.vocab_size == 290 < config.vocab_size
    config = read_model_config(saved(tmp_path, activation_sparsity_pattern=None, intermediate_size=80))
    assert (config.sparse_gates, config.intermediate_size) == ((), 80)
    changed = {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 0, "intermediate_size": [80] * 12}
    config = read_model_config(saved(tmp_path, activation_sparsity_pattern=None, **changed))
    assert len([one for one in config.sparse_gates if one is not None]) == 10
    assert config.sliding_layers == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11)


def test_gguf_files_say_the_same(tmp_path: Path) -> None:
    golden(CASE).model.config.save_pretrained(tmp_path)
    path = write_model(tmp_path / "model.gguf", golden(CASE).model, "gemma3n")
    ours, theirs = read_model_config(tmp_path), read_model_config(path)
    assert (ours.streams, ours.logits_cap, ours.num_shared_layers) == (theirs.streams, theirs.logits_cap, 3)
    assert ours.sparse_gates[2] is theirs.sparse_gates[2] is None
    assert np.allclose(ours.sparse_gates[:2], theirs.sparse_gates[:2])  # type: ignore[arg-type]


def test_the_text_of_a_whole_checkpoint(tmp_path: Path) -> None:
    expected = golden(CASE)
    expected.model.save_pretrained(tmp_path)
    logits = our_logits(tmp_path, expected.prompts[:1])[0]
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.timm_model.conv_stem", "audio_tower.conformer.0", "embed_vision.embedding", "embed_audio.e")
    renamed |= {f"model.{name}.weight": torch.ones(3, 2) for name in others}
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(our_logits(tmp_path, expected.prompts[:1])[0], logits)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"altup_active_idx": 4}, ModelFileError, "altup_active_idx must be one of 4 streams, from 0 on; got 4"),
        ({"intermediate_size": [80] * 5 + [96]}, UnsupportedModelError, "all layers must be alike"),
        ({"activation_sparsity_pattern": [0.5]}, ModelFileError, "activation_sparsity_pattern must be a number from 0"),
        ({"activation_sparsity_pattern": [1.0] * 6}, ModelFileError, "activation_sparsity_pattern must be a number"),
        ({"hidden_size_per_layer_input": 0}, UnsupportedModelError, "layers with inputs of their own are"),
        ({"num_kv_shared_layers": 6}, ModelFileError, "num_kv_shared_layers must leave a layer with K and V of each"),
        ({"laurel_rank": 0}, ModelFileError, "laurel_rank must be an integer from 1"),
    ],
)
def test_what_does_not_run_is_refused_by_name(
    changed: dict[str, Any], error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        read_model_config(saved(tmp_path, **changed))


def test_drafts_preemptions_and_chunks(tmp_path: Path) -> None:
    """Tokens are the same in any company; a draft model and n-grams draft, heads are refused by name."""
    golden(CASE).model.save_pretrained(tmp_path)
    folder = str(tmp_path)
    plain, _, _ = run(config_of(folder, None), num_requests=6)
    for options in ({"num_blocks_override": 40, "preemption_mode": "recompute"}, {"max_num_batched_tokens": 16}):
        assert run(config_of(folder, None, **options), num_requests=6)[0] == plain
    got, stats, _ = run(config_of(folder, "draft_model", folder), num_requests=6)
    assert got == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    assert run(config_of(folder, "ngram"), GREEDY, 3)[0] == run(config_of(folder, None), GREEDY, 3)[0]
    with pytest.raises(ConfigError, match="reads one stream of hidden states, and those of Gemma3nForCausalLM are in"):
        LocalExecutor(config_of(folder, "mtp"))
    with pytest.raises(ConfigError, match="has hidden states in several streams, which needs the C kernels"):
        LocalExecutor(config_of(folder, None, cpu_kernels="torch"))
    with pytest.raises(ConfigError, match=r"enable_lora: layers of .* do not support adapters"):
        LocalExecutor(config_of(folder, None, enable_lora=True))
