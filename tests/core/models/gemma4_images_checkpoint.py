"""Tiny random Gemma 4 models with encoders, tokenizer and processor, as folders; and what transformers computes."""

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

MARKS = ["<|image>", "<|image|>", "<image|>", "<|turn>", "<turn|>", "<bos>", "<|video|>", "<|audio|>"]
TEMPLATE = (
    "<bos>{% for message in messages %}<|turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
UNIT, POOL, ROWS = 12, 3, 70  # pixels of a row, patches on its side, rows of an image
_KINDS = ["sliding_attention", "full_attention"]
_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 80,
    "layer_types": _KINDS * 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 60, "num_hidden_layers": 3, "num_attention_heads": 2}
_VISION |= {"num_key_value_heads": 2, "head_dim": 20, "patch_size": 4, "position_embedding_size": 900}
#: Name -> settings of text_config and of vision_config: as the published sizes have them.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "e4b": (
        {
            "hidden_size_per_layer_input": 32,
            "num_hidden_layers": 6,
            "layer_types": [*_KINDS, "sliding_attention", *_KINDS, "full_attention"],
            "num_kv_shared_layers": 3,
            "pad_token_id": 1,
        },
        {"use_clipped_linears": True, "num_key_value_heads": 1},
    ),
    "31b": (
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
        },
        {"standardize": True},
    ),
}


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer(MARKS)


@lru_cache
def tiny_model(family: str) -> Any:
    """A model in float32 with random weights, the same each time; its attention is transformers' eager one."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    hf, (text, vision) = tiny_tokenizer(), FAMILIES[family]
    ids = {f"{name}_token_id": hf.token_to_id(f"<|{name}|>") for name in ("image", "video", "audio")}
    ids |= {"boi_token_id": hf.token_to_id("<|image>"), "eoi_token_id": hf.token_to_id("<image|>")}
    sizes = {**_TEXT, "vocab_size": hf.get_vocab_size(), "vocab_size_per_layer_input": hf.get_vocab_size(), **text}
    config = Gemma4Config(text_config=sizes, vision_config={**_VISION, **vision}, audio_config=None, **ids)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name.endswith(("input_min", "input_max", "output_min", "output_max")):
                weight.fill_(-1.5 if name.endswith("min") else 1.25)
            elif weight.ndim == 1 and not name.endswith("inv_freq"):
                weight.copy_(1 + 0.2 * torch.randn(weight.shape))
            elif weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape) * (0.1 if "embed_tokens" in name else 0.25))
    return model


def processor() -> Any:
    """transformers' image processor, with its Pillow backend."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=UNIT // POOL, pooling_kernel_size=POOL, max_soft_tokens=ROWS)


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a model's folder."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor().save_pretrained(folder)
    return folder


def inputs_of(ids: list[int], images: list[npt.NDArray[np.uint8]]) -> dict[str, Any]:
    """What transformers' model reads of a prompt with these token ids and images."""
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    inputs["mm_token_type_ids"] = (tokens == tiny_tokenizer().token_to_id("<|image|>")).int()
    if images:
        made = processor()(images=images, return_tensors="pt")
        inputs |= {name: made[name] for name in ("pixel_values", "image_position_ids")}
    return inputs


def greedy(family: str, ids: list[int], images: list[npt.NDArray[np.uint8]], count: int) -> list[int]:
    """transformers' greedy continuation."""
    with torch.no_grad():
        got = tiny_model(family).generate(**inputs_of(ids, images), max_new_tokens=count, do_sample=False)
    return [int(token) for token in got[0, len(ids) :]]


def write_pooled_projector(path: Path, family: str) -> Path:
    """Write the encoder as llama.cpp's converter does, with a tensor of an encoder of audio next to it."""
    model, writer = tiny_model(family), gguf.GGUFWriter(path, "clip")
    vision = model.config.vision_config
    writer.add_clip_has_vision_encoder(True)
    writer.add_string("clip.vision.projector_type", "gemma4v")
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_image_size(224)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.num_hidden_layers)
    writer.add_vision_head_count(vision.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(1e-6)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    kinds = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    for name, tensor in model.model.state_dict().items():
        if not name.startswith(("vision_tower.", "embed_vision.")):
            continue
        theirs = f"model.{name}".replace("model.vision_tower.encoder.", "vision_model.model.")
        theirs = theirs.replace(".linear.", ".")
        numbers = tensor.float().numpy().reshape(tensor.shape or (1,))
        if theirs.endswith("position_embedding_table"):
            theirs += ".weight"
        if theirs.endswith("input_proj.weight"):
            side = vision.patch_size
            numbers = np.ascontiguousarray(numbers.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
        writer.add_tensor(names.get_name(theirs, kinds), numbers)
    writer.add_tensor("a.blk.0.attn_q.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
