"""A tiny random LFM2-VL with its tokenizer and processor, as a folder; and transformers' own tokens."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from PIL import Image

from frontend.images.lfm2_vl import Lfm2VLImages
from tests.core.models.byte_tokenizer import byte_tokenizer

UNIT, SIDE = 8, 32  # pixels of a row; of a square's side
#: Of the processor, as its file has them.
SIZES: dict[str, Any] = {
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "tile_size": SIDE,
    "min_tiles": 2,
    "max_tiles": 4,
    "min_image_tokens": 4,
    "max_image_tokens": 20,
    "max_pixels_tolerance": 2.0,
}
MARKS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|im_start|>", "<|im_end|>"]
MARKS += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
#: Name -> whether merged patches are normalised together.
FAMILIES = {"lfm2-vl": True, "lfm2.5-vl": False}


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer(MARKS)


RULES = Lfm2VLImages(
    unit=UNIT,
    side=SIDE,
    tiles=(2, 4),
    tokens=(4, 20),
    tolerance=2.0,
    adds_whole=True,
    mark_id=tiny_tokenizer().token_to_id("<image>"),
)


@lru_cache
def tiny_model(family: str) -> Any:
    """A model in float32 with random weights, the same each time."""
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    text = {"model_type": "lfm2", "vocab_size": tiny_tokenizer().get_vocab_size(), "hidden_size": 48}
    text |= {"intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"layer_types": ["conv", "full_attention", "conv"], "max_position_embeddings": 1024}
    text |= {"block_auto_adjust_ff_dim": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    vision = {"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 52, "patch_size": 4}
    vision |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_patches": 36, "vision_use_head": False}
    config = Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tiny_tokenizer().token_to_id("<image>"),
        projector_hidden_size=44,
        projector_use_layernorm=FAMILIES[family],
    )
    torch.manual_seed(5)
    model = Lfm2VlForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * (0.1 if "embed_tokens" in name else 0.25)
            weight.copy_(drawn + 1 if weight.ndim == 1 and name.endswith("weight") else drawn)
    return model


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a model's folder."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"image_processor_type": "Lfm2VlImageProcessorFast", "resample": 2, **SIZES}
    settings |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_image_splitting": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def normalised(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers that transformers' model reads for colours, with a mean and a deviation of a half."""
    half = np.float32(0.5) * np.float32(255)
    return (pixels.astype(np.float32) - half) / half


def patches_of(pixels: npt.NDArray[np.uint8], patch: int) -> npt.NDArray[np.float32]:
    """The patches [n, patch * patch * 3] of a square, row by row."""
    height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
    cut = normalised(pixels).reshape(height, patch, width, patch, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(cut).reshape(height * width, -1)


def vision_inputs(images: list[npt.NDArray[np.uint8]]) -> dict[str, Any]:
    """What transformers' model reads of images: the pixels of RULES, which its processor's goldens check."""
    squares = [one for image in images for one in RULES.squares_of(Image.fromarray(image)).pixels]
    patches = [patches_of(one, UNIT // 2) for one in squares]
    most = max(map(len, patches))
    padded = np.stack([np.pad(one, ((0, most - len(one)), (0, 0))) for one in patches])
    mask = np.stack([np.arange(most) < len(one) for one in patches]).astype(np.int32)
    shapes = np.array([[one.shape[0] // 4, one.shape[1] // 4] for one in squares])
    return {
        "pixel_values": torch.tensor(padded),
        "pixel_attention_mask": torch.tensor(mask),
        "spatial_shapes": torch.tensor(shapes),
    }


def greedy(family: str, ids: list[int], images: list[npt.NDArray[np.uint8]], count: int) -> list[int]:
    """transformers' greedy continuation."""
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **vision_inputs(images)}
    with torch.no_grad():
        got = tiny_model(family).generate(**inputs, max_new_tokens=count, do_sample=False)
    return [int(token) for token in got[0, len(ids) :]]
