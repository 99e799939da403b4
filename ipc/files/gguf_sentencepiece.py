"""SentencePiece vocabularies of GGUF files ("llama": Llama 2, Mistral, Gemma), as a `tokenizers.Tokenizer`.

SentencePiece writes spaces as ▁ and begins with single characters. It merges, again and again, the two neighbours whose
union is the token with the best score, and the leftmost of equals. A character that is no token becomes its UTF-8
bytes, one token <0xNN> each. The library merges by rank instead. So every way to cut a token into two tokens is a merge
here, ranked by the token's score. The two methods differ at most where two ways to write one token overlap in the text:
"aaaa" is both "a" + "aaa" and "aaa" + "a", and of "a", "aaa", "a" the library merges the better ranked pair, not the
left one. A file made from a tokenizer.json lists its merges and has no meaningful scores; then the merges are used.
"""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

_SPACE = "▁"
#: Types of tokens that no merge makes: 2 unknown, 3 control, 6 byte.
_RESERVED = (2, 3, 6)


def build_sentencepiece(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unknown: int | None,
    add_space_prefix: bool,
) -> tokenizers.Tokenizer:
    """Return the tokenizer of these tokens (token -> id, ids without gaps) and merges, the first ranked best.

    unknown: id of the token for text that has no bytes either. add_space_prefix: each stretch of text between special
    tokens begins as if after a space (llama.cpp and Llama 2's own tokenizer.json do this); decoding removes that space.
    """
    names = list(vocabulary)
    model = models.BPE(
        vocab=dict(vocabulary),
        merges=list(merges),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else names[unknown],
    )
    tokenizer = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if add_space_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return tokenizer


def merges_of_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return every cut of a token into two tokens: best score first, and the smaller id first among equals.

    scores, types: by id.
    """
    parts = {token: index for token, index in vocabulary.items() if types[index] not in _RESERVED}
    merges = []
    for token in sorted(parts, key=lambda token: (-scores[parts[token]], parts[token])):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in parts and right in parts]
    return merges
