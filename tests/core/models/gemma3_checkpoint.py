"""A tiny random Gemma 3 with a vision encoder, its tokenizer and processor, as a folder; and transformers' own."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from tests.core.models.byte_tokenizer import byte_tokenizer

SIDE = 48  # of an image, pixels
ROWS = 16  # tokens of an image
WINDOW = 12  # of local layers: less than an image's tokens
MARKS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<start_of_image>{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, and the marks of images."""
    return byte_tokenizer([*MARKS, "<bos>", "<start_of_turn>", "<end_of_turn>"])


@lru_cache
def tiny_model() -> Any:
    """A model in float32 with random weights, the same each time; its attention is transformers' eager one."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    hf = tiny_tokenizer()
    text = {"model_type": "gemma3_text", "vocab_size": hf.get_vocab_size(), "hidden_size": 48, "head_dim": 16}
    text |= {"intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 1024, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    vision = {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 3}
    vision |= {"image_size": SIDE, "patch_size": 4, "vision_use_head": False, "hidden_act": "gelu_pytorch_tanh"}
    config = Gemma3Config(
        text_config=text,
        vision_config={"model_type": "siglip_vision_model", **vision},
        mm_tokens_per_image=ROWS,
        image_token_index=hf.token_to_id("<image_soft_token>"),
        boi_token_index=hf.token_to_id("<start_of_image>"),
        eoi_token_index=hf.token_to_id("<end_of_image>"),
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.ndim == 1 and name.endswith("weight")
            scale = 0.05 if "embed_tokens" in name else 0.15 if is_norm else 0.3
            is_layer_norm = is_norm and "vision_tower" in name
            weight.copy_(torch.randn(weight.shape) * scale + (1 if is_layer_norm else 0))
    return model


def write_checkpoint(folder: Path, **processor: Any) -> Path:
    """Write the model's folder; processor: changes of preprocessor_config.json."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    settings |= {"do_pan_and_scan": None, "do_convert_rgb": None, "resample": 2, "image_seq_length": ROWS, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def processed(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """transformers' pixel_values [1, 3, side, side] of an image, by its Pillow backend."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    made = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return np.asarray(made([[image]], input_data_format="channels_last")["pixel_values"])
