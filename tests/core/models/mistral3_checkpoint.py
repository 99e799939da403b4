"""A tiny random Mistral 3 with Pixtral's encoder, its tokenizer and processor, as a folder; and transformers' own."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from tests.core.models.byte_tokenizer import byte_tokenizer

MARKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "<s>"]
TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}[IMG]{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'user' %}[/INST]{% endif %}{% endfor %}"
)
UNIT, LONGEST = 8, 70  # pixels of a row; of an image's longer side
#: Name -> model_type and further settings of text_config, and of vision_config.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral-small": ("mistral", {}, {"hidden_act": "silu"}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "llama_4_scaling_beta": 0.1,
                "max_position_embeddings": 1024,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
        },
        {"hidden_act": "gelu"},
    ),
    "pixtral": ("mistral", {}, {"hidden_act": "silu", "patch_size": UNIT}),
}
#: Those whose files have Pixtral's encoder without a merger of patches.
PLAIN = ("pixtral",)


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer(MARKS)


@lru_cache
def tiny_model(family: str) -> Any:
    """A model in float32 with random weights, the same each time."""
    from transformers import (
        LlavaConfig,
        LlavaForConditionalGeneration,
        Mistral3Config,
        Mistral3ForConditionalGeneration,
    )

    hf, (kind, own, seeing) = tiny_tokenizer(), FAMILIES[family]
    text = {"model_type": kind, "vocab_size": hf.get_vocab_size(), "hidden_size": 48, "head_dim": 16, **own}
    text |= {"intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 1024, "sliding_window": None, "rms_norm_eps": 1e-4}
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2, "image_size": LONGEST, "patch_size": 4, **seeing}
    parts = {"text_config": text, "vision_config": vision, "image_token_index": hf.token_to_id("[IMG]")}
    torch.manual_seed(5)
    if family in PLAIN:
        plain = LlavaConfig(
            **parts, vision_feature_layer=-1, vision_feature_select_strategy="full", tie_word_embeddings=False
        )
        model: Any = LlavaForConditionalGeneration(plain).eval()
    else:
        config = Mistral3Config(**parts, spatial_merge_size=2, tie_word_embeddings=False)
        model = Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * (0.1 if "embed_tokens" in name else 0.25)
            weight.copy_(drawn + 1 if weight.ndim == 1 else drawn)
    return model


def processor() -> Any:
    """transformers' image processor, with its Pillow backend."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size={"height": UNIT, "width": UNIT})


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a model's folder."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor().save_pretrained(folder)
    return folder


def greedy(family: str, ids: list[int], images: list[npt.NDArray[np.uint8]], count: int) -> list[int]:
    """transformers' greedy continuation."""
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if images:
        made = processor()(images=images, return_tensors="pt")
        inputs |= {name: torch.as_tensor(np.asarray(made[name])) for name in ("pixel_values", "image_sizes")}
    with torch.no_grad():
        got = tiny_model(family).generate(**inputs, max_new_tokens=count, do_sample=False)
    return [int(token) for token in got[0, len(ids) :]]


def write_pixtral_projector(path: Path, family: str) -> Path:
    """Write the encoder as llama.cpp's converter does: pairs of Q's and K's heads next to each other."""
    model, writer = tiny_model(family), gguf.GGUFWriter(path, "clip")
    vision = model.config.vision_config
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("pixtral")
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(vision.image_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_image_mean(processor().image_mean)
    writer.add_vision_image_std(processor().image_std)
    writer.add_vision_attention_layernorm_eps(1e-5)
    if vision.hidden_act == "silu":
        writer.add_vision_use_silu(True)
    else:
        writer.add_vision_use_gelu(True)
    if family not in PLAIN:
        writer.add_vision_spatial_merge_size(model.config.spatial_merge_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    for name, tensor in model.model.state_dict().items():
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue
        numbers = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = numbers.reshape(vision.num_attention_heads, 2, -1, numbers.shape[1])
            numbers = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(numbers.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), numbers)
    word = tiny_tokenizer().token_to_id("[IMG_BREAK]")
    rows = model.model.language_model.embed_tokens.weight.detach().float().numpy()
    writer.add_tensor("v.token_embd.img_break", np.ascontiguousarray(rows[word]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
