"""Tiny random encoders, made by transformers, with a WordPiece tokenizer; and what transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ipc.tables.arrays import Floats

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
#: transformers' class without its ending -> settings beside SIZES. Prompts have at most 300 tokens.
KINDS: dict[str, dict[str, Any]] = {
    "Bert": {"max_position_embeddings": 300},
    "XLMRoberta": {"max_position_embeddings": 302, "type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "gelu_new"},
    "NomicBert": {"max_position_embeddings": 300},
    "JinaEmbeddingsV3": {"max_position_embeddings": 300},
    "ModernBert": {
        "max_position_embeddings": 300,
        "local_attention": 40,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["the", "sky", "is", "blue", "today", "bread", "baked", "in", "an", "oven", "query", ":", "##s", "##ly"],
]


def save_encoder(folder: Path, kind: str, ending: str, **settings: Any) -> Any:
    """A random checkpoint of the kind, with norms and biases that are not those of a new model; it in float32."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **settings})
    model = getattr(transformers, kind + ending)(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.6, 0.3)
            else:
                parameter.mul_(5)
    model.save_pretrained(folder)
    return model


def add_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer that closes texts and pairs as BERT's does."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=special)
    tokenizer.enable_truncation(16)  # as files have it; it does not count
    tokenizer.save(str(folder / "tokenizer.json"))


def add_modules(folder: Path, mode: str, **files: Any) -> None:
    """sentence-transformers' files beside the weights; files: JSON by the name's stem."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [{"path": f"{n}_{kind}" if n else "", "type": f"a.b.{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))


def states(model: Any, ids: list[int], kinds: list[int] | None = None) -> Floats:
    """transformers' last hidden states of a prompt."""
    more = {} if kinds is None else {"token_type_ids": torch.tensor([kinds])}
    with torch.no_grad():
        found: Floats = model(torch.tensor([ids]), **more).last_hidden_state[0].float().numpy()
    return found


def unit(x: Floats) -> Floats:
    scaled: Floats = x / np.linalg.norm(x)
    return scaled
