"""Tiny random Qwen models with their encoders, tokenizer and processor, as folders; and what transformers computes."""

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

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_VISION = {"hidden_size": 32, "intermediate_size": 40, "depth": 3, "num_heads": 2, "out_hidden_size": 48}
_VISION |= {"patch_size": 4, "spatial_merge_size": 2}
_QWEN35 = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_QWEN35 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_QWEN35 |= {"linear_value_head_dim": 8, "partial_rotary_factor": 0.5}
#: Name -> stem of transformers' classes, settings of text_config, and of vision_config.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        "Qwen2VL",
        {"hidden_size": 64, "rope_parameters": _ROPE},
        {**_VISION, "embed_dim": 32, "hidden_size": 64},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"hidden_size": 64, "rope_parameters": _ROPE},
        {**_VISION, "out_hidden_size": 64, "window_size": 24, "fullatt_block_indexes": [1]},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        {**_VISION, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3.5": (
        "Qwen3_5",
        {**_QWEN35, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        {**_VISION, "num_position_embeddings": 16},
    ),
}
#: An encoder of large patches, for large images; not in FAMILIES, whose images are small.
LARGE = "qwen3-vl-large"
_LARGE = {
    LARGE: (*FAMILIES["qwen3-vl"][:2], {**FAMILIES["qwen3-vl"][2], "patch_size": 64}),
}
LARGE_SIZE = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
UNIT = 8  # pixels of a row
SIZE = {"shortest_edge": 4 * UNIT**2, "longest_edge": 60 * UNIT**2}


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer(MARKS)


@lru_cache
def tiny_model(family: str) -> Any:
    """A model in float32 with random weights, the same each time."""
    import transformers

    stem, text, vision = (FAMILIES | _LARGE)[family]
    ids = {f"{name}_token_id": tiny_tokenizer().token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{name}_token_id": tiny_tokenizer().token_to_id(f"<|vision_{name}|>") for name in ("start", "end")}
    sizes = {**_TEXT, "vocab_size": tiny_tokenizer().get_vocab_size(), **text}
    config = getattr(transformers, f"{stem}Config")(text_config=sizes, vision_config=vision, **ids)
    config.tie_word_embeddings = False
    torch.manual_seed(5)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * (0.05 if "embed_tokens" in name else 0.25)
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(drawn + 1 if is_norm and "qwen3_5" not in config.model_type else drawn)
    return model


def processor(family: str = "") -> Any:
    """transformers' image processor, with its Pillow backend."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if family == LARGE:
        return Qwen2VLImageProcessorPil(size=LARGE_SIZE, patch_size=64, merge_size=2)
    return Qwen2VLImageProcessorPil(size=SIZE, patch_size=4, merge_size=2)


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a model's folder."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor(family).save_pretrained(folder)
    return folder


def inputs_of(ids: list[int], images: list[npt.NDArray[np.uint8]], family: str = "") -> dict[str, Any]:
    """What transformers' model reads of a prompt with these token ids and images."""
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["mm_token_type_ids"] = (tokens == tiny_tokenizer().token_to_id("<|image_pad|>")).int()
    if images:
        made = processor(family)(images=images, return_tensors="pt")
        inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
    return inputs


def greedy(family: str, ids: list[int], images: list[npt.NDArray[np.uint8]], count: int) -> list[int]:
    """transformers' greedy continuation."""
    with torch.no_grad():
        got = tiny_model(family).generate(**inputs_of(ids, images, family), max_new_tokens=count, do_sample=False)
    return [int(token) for token in got[0, len(ids) :]]


def write_grid_projector(path: Path, family: str, kind: str) -> Path:
    """Write the encoder as llama.cpp's converter does: two tensors for patches; Q, K and V apart in Qwen 2's."""
    model = tiny_model(family)
    vision, writer = model.config.vision_config, gguf.GGUFWriter(path, "clip")
    width = getattr(vision, "embed_dim", vision.hidden_size)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
    writer.add_vision_embedding_length(width)
    writer.add_vision_feed_forward_length(model.config.text_config.hidden_size)  # as it is for Qwen2-VL
    writer.add_vision_block_count(vision.depth)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_image_mean(processor().image_mean)
    writer.add_vision_image_std(processor().image_std)
    writer.add_uint32("clip.vision.image_min_pixels", SIZE["shortest_edge"])
    writer.add_uint32("clip.vision.image_max_pixels", SIZE["longest_edge"])
    deep = list(getattr(vision, "deepstack_visual_indexes", ()))
    if deep:
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(vision.depth)])
    if family == "qwen2.5-vl":
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
        writer.add_vision_window_size(vision.window_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.depth)
    for name, tensor in model.model.visual.state_dict().items():
        numbers, (stem, kind_of) = tensor.float().numpy(), name.rsplit(".", 1)
        if name == "patch_embed.proj.weight":
            writer.add_tensor("v.patch_embd.weight", np.ascontiguousarray(numbers[:, :, 0]))
            writer.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(numbers[:, :, 1]))
        elif stem.startswith("deepstack_merger_list."):
            _, index, part = stem.split(".")
            writer.add_tensor(f"v.deepstack.{deep[int(index)]}.{part.removeprefix('linear_')}.{kind_of}", numbers)
        elif stem.startswith("merger."):
            part = {"linear_fc1": "mm.0", "mlp.0": "mm.0", "linear_fc2": "mm.2", "mlp.2": "mm.2"}
            writer.add_tensor(f"{part.get(stem.removeprefix('merger.'), 'v.post_ln')}.{kind_of}", numbers)
        elif stem.endswith(".qkv") and kind != "qwen3vl_merger":
            for part, rows in zip("qkv", np.split(numbers, 3), strict=True):
                own = names.get_name(f"visual.{stem.removesuffix('qkv')}{part}")
                writer.add_tensor(f"{own}.{kind_of}", np.ascontiguousarray(rows))
        else:
            writer.add_tensor(f"{names.get_name(f'visual.{stem}')}.{kind_of}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
