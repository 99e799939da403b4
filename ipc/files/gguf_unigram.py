"""Unigram vocabularies of GGUF files, of kind "t5" (XLM-R: bge-m3, multilingual-e5), as a `tokenizers.Tokenizer`.

SentencePiece's unigram model (Kudo 2018, arXiv 1804.10959) cuts a text into the tokens whose scores have the largest
sum; text that no token covers is the unknown token. Before that the file's table, if there is one, replaces characters
by others, and spaces become ▁: one before each word, however many stood there, as XLM-R's tokenizer.json has it.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ipc.errors import ModelFileError

_SPACE = "▁"


def build_unigram(
    tokens: Sequence[str], scores: Sequence[float], unknown: int | None, characters: Sequence[int]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of these tokens with their scores, both by id.

    unknown: id of the token for text without tokens. characters: the bytes of SentencePiece's table of replacements;
    none = characters stay as they are. Errors: ModelFileError.
    """
    if unknown is None:
        raise ModelFileError(
            "the GGUF file's vocabulary names no unknown token: tokenizer.ggml.unknown_token_id is missing"
        )
    model = models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown, byte_fallback=False)
    tokenizer = tokenizers.Tokenizer(model)
    if characters:
        tokenizer.normalizer = _replacements(characters)
    words = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme="always")
    return tokenizer


def _replacements(characters: Sequence[int]) -> normalizers.Normalizer:
    try:
        return normalizers.Precompiled(bytes(characters))
    except Exception as error:  # the library raises Exception itself
        raise ModelFileError(f"tokenizer.ggml.precompiled_charsmap is no table of replacements: {error}") from None
