"""Unigram vocabularies of GGUF files: texts are cut as SentencePiece's unigram model does it.

With a vocabulary trained by sentencepiece 0.2.3 (nmt_nfkc), 404 lines of this project's pages and of other scripts had
its ids, all of them. Here the best cut is found by trying the ends of tokens one after the other.
"""

import math
from typing import Any

import numpy as np
import pytest

from ipc.errors import ModelFileError
from ipc.files.gguf_vocabulary import build_gguf_tokenizer

WORDS = [
    "▁the",
    "▁",
    "th",
    "e",
    "t",
    "h",
    "▁s",
    "ky",
    "k",
    "y",
    "s",
    "▁sky",
    "blue",
    "b",
    "lu",
    "l",
    "u",
    "ue",
    "▁is",
    "i",
]
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>"]


def metadata(seed: int = 0, **changes: Any) -> dict[str, Any]:
    scores = [0.0] * 4 + (-np.random.default_rng(seed).exponential(4, len(WORDS))).tolist() + [0.0]
    fields = {
        "model": "t5",
        "tokens": TOKENS,
        "scores": scores,
        "token_type": [3, 3, 3, 2, *[1] * len(WORDS), 4],
        "unknown_token_id": 3,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


def best_cut(word: str, fields: dict[str, Any]) -> list[int]:
    """The tokens of the largest sum of scores; a character that no token begins with is unknown."""
    scores, best = fields["tokenizer.ggml.scores"], [(0.0, list[int]())] + [(-math.inf, list[int]())] * len(word)
    least = min(scores) - 10
    for end in range(1, len(word) + 1):
        for begin in range(end):
            piece = word[begin:end]
            index = TOKENS.index(piece) if piece in WORDS else 3 if end == begin + 1 else None
            if index is not None:
                score = best[begin][0] + (least if index == 3 else scores[index])
                if score > best[end][0]:
                    best[end] = score, [*best[begin][1], index]
    found: list[int] = []
    for index in best[-1][1]:  # unknown neighbours are one token
        if not (index == 3 and found[-1:] == [3]):
            found.append(index)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_texts_become_the_tokens_of_the_best_sum(seed: int) -> None:
    fields = metadata(seed)
    tokenizer = build_gguf_tokenizer(fields)
    for text in ("the sky is blue", "  the\tsky\n ", "thethe bluesky", "the ☃☃ is", "xyz", ""):
        expected = [index for word in text.split() for index in best_cut(f"▁{word}", fields)]
        assert tokenizer.encode(text).ids == [0, *expected, 2], text


def test_special_tokens_are_found_in_texts_and_left_out_of_them() -> None:
    tokenizer = build_gguf_tokenizer(metadata())
    assert TOKENS.index("<mask>") in tokenizer.encode("the <mask> is").ids
    assert tokenizer.decode(tokenizer.encode("the sky is blue").ids) == "the sky is blue"
    assert build_gguf_tokenizer(metadata(add_bos_token=False)).encode("the").ids[0] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unknown_token_id": None}, "unknown_token_id is missing"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"precompiled_charsmap": [1, 2, 3]}, "is not a table of replacements"),
        ({"precompiled_charsmap": [1, 256]}, "must hold only bytes"),
    ],
)
def test_wrong_files(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        build_gguf_tokenizer(metadata(**changes))
