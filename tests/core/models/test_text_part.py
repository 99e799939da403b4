"""The text's model of a checkpoint with images gives what it gives alone; what is of images is not read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.model_config import read_model_config
from ipc.errors import ModelFileError, UnsupportedModelError
from tests.core.models.checkpoints import check_greedy, check_logits, golden, golden_of, our_logits
from tests.core.models.gguf_checkpoints import write_model
from tests.core.models.text_part_checkpoints import TEXT_PART_CASES, build_whole

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

NAMES = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}


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


@pytest.mark.parametrize("case", TEXT_PART_CASES)
def test_logits_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    whole = build_whole(case)  # transformers' Llama 4 needs an image
    expected = golden_of(whole.language_model if case == "llama4" else whole)
    whole.save_pretrained(tmp_path)
    check_logits(tmp_path, expected)
    check_greedy(tmp_path, expected)


def test_a_head_may_be_the_embedding(tmp_path: Path) -> None:
    """As the whole model's config says, whatever its text's model's has."""
    for case in ("mistral3", "qwen2.5-vl"):
        expected = golden_of(build_whole(case, tied=True))
        expected.model.save_pretrained(tmp_path / case)
        path = tmp_path / case / "config.json"
        settings = json.loads(path.read_text())
        settings["text_config"]["tie_word_embeddings"] = False
        path.write_text(json.dumps(settings))
        check_logits(tmp_path / case, expected)


def test_the_first_configs_and_names_of_qwen2_5_vl(tmp_path: Path) -> None:
    """The text's settings and weights have no part of their own there, and the rotation is called mrope."""
    expected = golden_of(build_whole("qwen2.5-vl"))
    expected.model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    text = settings.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 2]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    names = {name: settings[name] for name in ("architectures", "model_type", "vision_config", "tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps({**text, **names}))
    tensors = {
        name.replace("language_model.", ""): one for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    tensors = {name.replace("model.visual.", "visual."): tensor for name, tensor in tensors.items()}
    assert any(name.startswith("visual.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    check_logits(tmp_path, expected)


@pytest.mark.parametrize("size", [40, 24, 48])
def test_matrices_of_experts_as_qwen3_vl_was_published(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor for all experts, whose rows are inputs. With 24 gate and up are square together, with 48 down."""
    stem, text, vision = TEXT_PART_CASES["qwen3-vl-moe"]
    monkeypatch.setitem(TEXT_PART_CASES, "qwen3-vl-moe", (stem, {**text, "moe_intermediate_size": size}, vision))
    expected = golden_of(build_whole("qwen3-vl-moe"))
    expected.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: one.transpose(1, 2).contiguous() for name, one in tensors.items() if ".mlp.experts." in name}
    assert len(turned) == 4
    save_file(tensors | turned, tmp_path / "model.safetensors")
    check_logits(tmp_path, expected)


@pytest.mark.parametrize("kind", ["llama", ["mistral"]])
def test_a_text_of_another_architecture_is_refused(kind: object, tmp_path: Path) -> None:
    build_whole("mistral3").config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"]["model_type"] = kind
    settings["architectures"] = ["Mistral3ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    text = re.escape(f"model_type={kind!r} is not supported; 'ministral3' and 'mistral' are")
    with pytest.raises(UnsupportedModelError, match=text):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("case", "architecture"), [("qwen3", "qwen3vl"), ("qwen2", "qwen2vl"), ("qwen3-moe", "qwen3vlmoe")]
)
def test_gguf_files_with_their_names(case: str, architecture: str, tmp_path: Path) -> None:
    """llama.cpp's converter writes the text's model with the sections of the rotation, which text does not need."""

    def more(writer: Any) -> None:
        writer.add_rope_dimension_sections([4, 4, 4, 0])
        writer.add_uint32(f"{architecture}.n_deepstack_layers", 3)

    expected = golden(case)
    path = write_model(tmp_path / "model.gguf", expected.model, architecture, more)
    check_logits(path, expected)
