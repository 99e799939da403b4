"""A tiny random Qwen3-VL-Embedding, in the forms in which it is published; and what transformers computes."""

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
from tests.core.models import grid_checkpoints
from tests.core.models.byte_tokenizer import byte_tokenizer
from tests.core.models.grid_checkpoints import MARKS, TEMPLATE, inputs_of, processor, tiny_model
from tests.core.models.test_pooling_models import add_modules, unit

FAMILY = "qwen3-vl"
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
#: The instruction of the model's own script; and another, by name.
USUAL = "Represent the user's input."
PROMPTS = {"usual": USUAL, "query": "Retrieve images or text relevant to the user's query."}
Images = Sequence[npt.NDArray[np.uint8]]


def tiny_tokenizer(end: str | None = None) -> tokenizers.Tokenizer:
    """Bytes and marks, as the model's embedding has them. end: a token that the post-processor adds to a text."""
    hf = byte_tokenizer(MARKS)
    if end is not None:
        hf.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, hf.token_to_id(end))])
    return hf


@lru_cache
def their_processor(end: str | None = None) -> Any:
    """transformers' processor, without its part for videos."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class ForImages(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(end), pad_token="<|im_end|>")
    return ForImages(processor(), tokenizer, None, TEMPLATE)


def write_checkpoint(folder: Path, *, form: str = "modules", end: str | None = None) -> Path:
    """Write a model's folder.

    form: "plain" = Qwen3-VL's files alone; "modules" = with those of sentence-transformers; "saved" = as
    sentence-transformers saves it, without a head. end: of tiny_tokenizer().
    """
    grid_checkpoints.write_checkpoint(FAMILY, folder)
    tiny_tokenizer(end).save(str(folder / "tokenizer.json"))
    if form == "plain":
        return folder
    if form == "saved":
        tiny_model(FAMILY).model.save_pretrained(folder)
    add_modules(folder, "lasttoken")
    method = {"method": "forward", "method_output_name": "last_hidden_state"}
    files: dict[str, Any] = {
        "1_Pooling/config": {"embedding_dimension": 48, "pooling_mode": "lasttoken", "include_prompt": True},
        "config_sentence_transformers": {"prompts": PROMPTS, "default_prompt_name": "usual"},
        "sentence_bert_config": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": method, "image": method, "message": {**method, "format": "structured"}},
            "module_output_name": "token_embeddings",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
    }
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def prompt_of(text: str, instruction: str = USUAL) -> str:
    """The prompt of the model's own script. text: has MARK for each image."""
    system = f"<|im_start|>system\n{instruction}<|im_end|>\n"
    return f"{system}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def their_state(ids: list[int], images: Images) -> Floats:
    """transformers' hidden state of the last token."""
    states = tiny_model(FAMILY).model(**inputs_of(ids, list(images), FAMILY)).last_hidden_state
    state: Floats = states[0, -1].numpy()
    return state


def their_vector(
    content: Sequence[Any], instruction: str | None = USUAL, end: str | None = None, *, opens_answer: bool = True
) -> tuple[list[int], Floats]:
    """The token ids of a chat and sentence-transformers' vector of it.

    content: of the user's message, texts and images in order. instruction: the system message; None = none.
    """
    from PIL import Image

    images = [one for one in content if not isinstance(one, str)]
    parts = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": Image.fromarray(one)}
        for one in content
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": instruction}]})
    made = their_processor(end).apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=opens_answer
    )
    ids: list[int] = made["input_ids"][0].tolist()
    return ids, unit(their_state(ids, images))
