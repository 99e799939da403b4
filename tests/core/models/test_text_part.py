"""The text's model of a checkpoint with images gives what it gives alone; what is of images is not read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from ipc.errors import ModelFileError
from tests.core.models.checkpoints import golden, our_logits

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

NAMES = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {"depth": 2}}


def as_part(folder: Path, **settings: Any) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**NAMES, "text_config": text, **settings}))


def test_the_text_of_a_checkpoint_with_images_is_the_texts_model(tmp_path: Path) -> None:
    expected = golden("qwen3.5")
    expected.model.save_pretrained(tmp_path)
    alone, shortest = read_model_config(tmp_path), expected.prompts[:1]
    logits = our_logits(tmp_path, shortest)[0]
    as_part(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {"model.visual.patch_embed.proj.weight": torch.ones(3, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(renamed, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path) == alone
    assert torch.equal(our_logits(tmp_path, shortest)[0], logits)


def test_settings_beside_the_texts_own_count_where_it_has_none(tmp_path: Path) -> None:
    golden("qwen3.5").model.config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    as_part(tmp_path, tie_word_embeddings=True)
    assert read_model_config(tmp_path).tie_word_embeddings
    (tmp_path / "config.json").write_text(json.dumps(NAMES))
    with pytest.raises(ModelFileError, match="text_config is missing"):
        read_model_config(tmp_path)
