"""A tiny random InternVL with its tokenizer and processor, as a folder; and transformers' own."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from tests.core.models.byte_tokenizer import byte_tokenizer

SQUARE, ROWS, MOST = 32, 16, 4  # pixels of a square's side; its tokens; squares of an image
MARKS = ["<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<IMG_CONTEXT>\n{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
#: Name -> model_type and further settings of text_config, and of vision_config.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "internvl3": ("qwen2", {}, {"attention_bias": True}),
    "internvl3.5": ("qwen3", {"head_dim": 16}, {"attention_bias": False}),
    "internvl3-6b": ("qwen2", {}, {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}),
}


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer(MARKS)


@lru_cache
def tiny_model(family: str) -> Any:
    """A model in float32 with random weights, the same each time."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    hf, (kind, own, seeing) = tiny_tokenizer(), FAMILIES[family]
    text = {"model_type": kind, "vocab_size": hf.get_vocab_size(), "hidden_size": 48, "intermediate_size": 80, **own}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": [SQUARE, SQUARE], "patch_size": [4, 4], **seeing}
    config = InternVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=hf.token_to_id("<IMG_CONTEXT>"),
        image_seq_length=ROWS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = InternVLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * (0.1 if "embed_tokens" in name else 0.25)
            is_factor = weight.ndim == 1 and (name.endswith("weight") or "lambda" in name)
            weight.copy_(drawn + 1 if is_factor else drawn)
    return model


def processed(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """transformers' pixel_values [squares, 3, side, side], by its Pillow backend."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    size = {"height": SQUARE, "width": SQUARE}
    made = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=MOST)
    values = made(images=[image], return_tensors="np", input_data_format="channels_last")["pixel_values"]
    return np.asarray(values, np.float32)


def write_checkpoint(family: str, folder: Path, **processor: Any) -> Path:
    """Write a model's folder; processor: changes of preprocessor_config.json."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": SQUARE, "width": SQUARE}}
    settings |= {"crop_to_patches": False, "min_patches": 1, "max_patches": MOST, "resample": 3, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def greedy(family: str, ids: list[int], images: list[npt.NDArray[np.uint8]], count: int) -> list[int]:
    """transformers' greedy continuation."""
    tokens = torch.tensor([ids])
    pixels = torch.tensor(np.concatenate([processed(image) for image in images]))
    with torch.no_grad():
        got = tiny_model(family).generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=pixels,
            max_new_tokens=count,
            do_sample=False,
        )
    return [int(token) for token in got[0, len(ids) :]]
