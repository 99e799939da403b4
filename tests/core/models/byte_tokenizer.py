"""byte_tokenizer: a tokenizer of single bytes, with marks."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def byte_tokenizer(marks: Sequence[str]) -> tokenizers.Tokenizer:
    """Bytes have ids 0 to 255, in the order of their letters; marks are special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(list(marks))
    return hf
