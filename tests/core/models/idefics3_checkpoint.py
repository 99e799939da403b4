"""A tiny random Idefics3 with its tokenizer and processor, as a folder; and what transformers computes with it."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from tests.core.models.byte_tokenizer import byte_tokenizer

SQUARE, LONGEST = 64, 192  # pixels
ROWS = 16  # tokens of a square
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
MARKS += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer([*MARKS, "<|im_start|>", "<end>"])


@lru_cache
def tiny_model() -> Any:
    """A model in float32 with random weights, the same each time."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vocab = tiny_tokenizer().get_vocab_size()
    text = {"model_type": "llama", "vocab_size": vocab, "hidden_size": 48, "intermediate_size": 96}
    text |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    vision = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
    vision |= {"image_size": SQUARE, "patch_size": 8}
    config = Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=tiny_tokenizer().token_to_id("<image>")
    )
    torch.manual_seed(3)
    model = Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * (0.05 if "embed_tokens" in name else 0.3)
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(drawn + 1 if is_norm else drawn)
    return model


def write_checkpoint(folder: Path, **processor: Any) -> Path:
    """Write the model's folder; processor: changes of preprocessor_config.json."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": LONGEST}}
    settings |= {"max_image_size": {"longest_edge": SQUARE}, "do_image_splitting": True, "resample": 1, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def noise(height: int, width: int, seed: int) -> npt.NDArray[np.uint8]:
    """An image [height, width, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)[:height, :width])


def processed(image: npt.NDArray[np.uint8], **settings: Any) -> Any:
    """transformers' pixel_values [1, n, 3, side, side], and rows and columns, by its Pillow backend."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    made = Idefics3ImageProcessorPil(
        size={"longest_edge": LONGEST}, max_image_size={"longest_edge": SQUARE}, return_row_col_info=True, **settings
    )
    return made([[image]], input_data_format="channels_last", return_row_col_info=True)
