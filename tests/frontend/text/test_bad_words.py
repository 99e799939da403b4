"""Bad words to token sequences: at the beginning of a text and behind a space, as vLLM forbids them."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from frontend.text.bad_words import bad_words_token_ids
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError

#: "\u0120" is a byte-level vocabulary's space.
WORDS = ["a", "b", "c", "\u0120", "ab", "\u0120ab", "\u0120a", "\u0120b"]
MERGES = [("a", "b"), ("\u0120", "ab"), ("\u0120", "a"), ("\u0120", "b")]


@pytest.fixture(scope="module")
def tokenizer():
    hf = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, MERGES))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(hf)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ab", [[4], [5]]),
        (" ab", [[4], [5]]),
        ("c", [[2]]),  # " c" is two tokens, which end in the same one
        ("abc", [[4, 2], [5, 2]]),
        ("a", [[0], [6]]),
    ],
)
def test_sequences(tokenizer, word, expected):
    assert bad_words_token_ids([word], tokenizer) == expected


def test_several_words_and_words_without_tokens(tokenizer):
    assert bad_words_token_ids(["c", "zzz", "b"], tokenizer) == [[2], [1], [7]]


def test_a_word_of_too_many_tokens(tokenizer):
    with pytest.raises(InvalidRequestError, match="has 65 tokens; at most 64 are allowed"):
        bad_words_token_ids(["c" * 65], tokenizer)
