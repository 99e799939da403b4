"""A small SentencePiece vocabulary as a GGUF file's metadata, and SentencePiece's merging done the obvious way."""

# ruff: noqa: RUF001 - the texts are meant to be unusual

from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, models, trainers

TRAINING_TEXT = [
    "Hello, world! The quick brown fox jumps over the lazy dog; the dog does not mind, the fox does.",
    "naïve café, 12 123 1234, it's we'll they're  two  spaces    four spaces",
    "你好，世界。世界你好 日本語のテキスト",
    "def f(x):\n    return x + 1\n\n",
    "aaaa aaaaaaaa abababab abcabcabc",
]


@lru_cache
def _trained() -> tuple[str, ...]:
    """Characters and merged words, in the order in which they were found."""
    texts = ["▁" + text.replace(" ", "▁") for text in TRAINING_TEXT]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=330, show_progress=False))
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted(vocabulary, key=vocabulary.__getitem__))


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Llama 2's layout: <unk>, <s>, </s>, the bytes, words with falling scores, characters; then a user-defined token.
    changes: keys after "tokenizer.ggml."; None = leave it out."""
    words = [word for word in _trained() if len(word) > 1]
    characters = [word for word in _trained() if len(word) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *characters, "<think>"]
    num_pieces = len(words) + len(characters)
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(index) for index in range(num_pieces)] + [-1000.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * num_pieces + [4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def greedy_merge(text: str, metadata: dict[str, Any]) -> list[int]:
    """Ids of a stretch of text between special tokens, by SentencePiece's own rule: merge the neighbours whose union
    has the best score, the leftmost of equals; what is no token in the end becomes bytes."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, kind in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True)
        if kind in (1, 4, 5)
    }
    parts = list(text.replace(" ", "▁"))
    if metadata.get("tokenizer.ggml.add_space_prefix", True) and text:
        parts.insert(0, "▁")
    while True:
        found = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(pairwise(parts))
            if left + right in scores
        ]
        if not found:
            break
        _, index = min(found)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    out = []
    for part in parts:
        out += [ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out
