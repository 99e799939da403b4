"""A tiny random EmbeddingGemma 2 with encoder, tokenizer, processor and prompts; and what transformers computes."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from ipc.tables.arrays import Floats
from tests.core.models.byte_tokenizer import byte_tokenizer
from tests.core.models.checkpoints import with_random_weights
from tests.core.models.gemma4_images_checkpoint import processor
from tests.core.models.test_pooling_models import add_modules, unit

_MARKS = ["<bos>", "<eos>", "<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>"]
#: Of the published names, those that this folder has.
PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "STS": "task: sentence similarity | query: ",
}
#: Like the published one: parts in order with nothing between, without special tokens.
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
WIDTH = 40  # of a vector
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 900}
_VISION |= {"use_clipped_linears": True, "standardize": True}
_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 24,
    "embedding_dim": WIDTH,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Bytes and marks; each text is between <bos> and <eos>."""
    hf = byte_tokenizer(_MARKS)
    ends = [(name, hf.token_to_id(name)) for name in _MARKS[:2]]
    hf.post_processor = TemplateProcessing(single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=ends)
    return hf


@lru_cache
def tiny_model() -> Any:
    """A model in float32 with random weights, the same each time; its attention is transformers' eager one."""
    import transformers

    hf = tiny_tokenizer()
    ids = {f"{name}_token_id": hf.token_to_id(f"<|{name}|>") for name in ("image", "video", "audio")}
    text = {**_TEXT, "vocab_size": hf.get_vocab_size()}
    config = transformers.EmbeddingGemma2Config(text_config=text, vision_config=_VISION, audio_config=None, **ids)
    config._attn_implementation = "eager"
    model = with_random_weights(transformers.EmbeddingGemma2Model(config).eval())
    with torch.no_grad():
        for name, weight in model.named_buffers():
            if name.endswith(("input_min", "input_max", "output_min", "output_max")):
                weight.fill_(-1.5 if name.endswith("min") else 1.25)
    return model


@lru_cache
def their_processor() -> Any:
    """transformers' processor, without its parts for audio and video."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.embedding_gemma2.processing_embedding_gemma2 import EmbeddingGemma2Processor

    class Images(EmbeddingGemma2Processor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    marks = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    hf = tiny_tokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=hf, pad_token="<bos>", extra_special_tokens=marks)
    return Images(feature_extractor=None, image_processor=processor(), tokenizer=tokenizer, video_processor=None)


def write_checkpoint(folder: Path, **processing: Any) -> Path:
    """Write a model's folder, with sentence-transformers' files. processing: of images, in place of the usual."""
    tiny_model().save_pretrained(folder)
    add_modules(folder, "mean_tokens")
    pooling = {"pooling_mode": "mean", "embedding_dimension": WIDTH, "include_prompt": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    texts = {"model_max_length": 700, "bos_token": "<bos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    images = {**processor().to_dict(), **processing}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    return folder


@torch.no_grad()
def their_states(
    text: str | None, images: Sequence[npt.NDArray[np.uint8]], dtype: torch.dtype = torch.float32
) -> tuple[list[int], Any]:
    """The token ids of a text with images, and transformers' hidden states of them. text: None = the images alone."""
    from PIL import Image

    given: dict[str, Any] = {} if text is None else {"text": [text]}
    if images:
        given["images"] = [[Image.fromarray(one) for one in images]]
    inputs = their_processor()(**given, return_tensors="pt")
    model = tiny_model().to(dtype)
    try:
        states = model(**inputs.to(dtype)).last_hidden_state[0].numpy()
    finally:
        model.float()
    return inputs["input_ids"][0].tolist(), states


def their_vector(text: str | None, images: Sequence[npt.NDArray[np.uint8]]) -> Floats:
    """sentence-transformers' vector: the mean of the states, of length 1."""
    vector: Floats = unit(their_states(text, images)[1].mean(0))
    return vector
