"""The text files of a model folder: what a tokenizer, chats and images need, without config.json and weights."""

import re
from pathlib import Path

#: In the order of their importance to a tokenizer.
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",  # of processors, before transformers 4.50
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"  # folder of named chat templates in transformers 5
_MAX_TEMPLATES = 64
_NAMED_TEMPLATE = re.compile(rf"{TEMPLATE_FOLDER}/[\w.-]{{1,64}}\.jinja")


def is_text_file(name: str) -> bool:
    """Return whether a file of this name, relative to the model's folder, is one of them."""
    return name in _NAMES or _NAMED_TEMPLATE.fullmatch(name) is not None


def text_files(folder: Path) -> list[str]:
    """Return the names of those that a folder has; at most the first 64 named templates."""
    named = [f"{TEMPLATE_FOLDER}/{file.name}" for file in sorted(folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"))]
    found = [name for name in _NAMES if (folder / name).is_file()]
    return found + [name for name in named if is_text_file(name)][:_MAX_TEMPLATES]
