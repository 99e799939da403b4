"""WordPiece vocabularies in GGUF files, of kind "bert": a `tokenizers.Tokenizer` like that of BERT's tokenizer.json.

llama.cpp's converter writes a word's first piece with a space mark before it, and the others without their "##".
Special tokens are not changed. The file does not say whether texts become lower case: they do, unless the vocabulary
has capitals.
"""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ipc.errors import ModelFileError

_SPACE, _FOLLOWS = "\u2581", "##"
_CONTROL = 3  # llama.cpp's type of special tokens


def build_wordpiece(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]) -> tokenizers.Tokenizer:
    """Return the tokenizer of these tokens. ids: of cls, seperator and unknown, if the file has them.

    Errors: ModelFileError for a vocabulary without these tokens, or with one twice.
    """
    pieces = [_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise ModelFileError(f"tokenizer.ggml.tokens has {len(pieces) - len(vocabulary)} pieces of words twice")
    ends = [_special(name, usual, ids, pieces, vocabulary) for name, usual in _SPECIAL]
    (first, last, unknown), has_capitals = ends, any(_has_capitals(piece) for piece in pieces)
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not has_capitals)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    special = [piece for piece, kind in zip(pieces, types, strict=True) if kind == _CONTROL or piece in ends]
    tokenizer.add_special_tokens([tokenizers.AddedToken(piece, normalized=False, special=True) for piece in special])
    return tokenizer


#: llama.cpp's names (in its spelling) of the tokens that BERT's texts need, and their usual texts.
_SPECIAL = (("cls", "[CLS]"), ("seperator", "[SEP]"), ("unknown", "[UNK]"))


def _piece(token: str, kind: int) -> str:
    if kind == _CONTROL or (token.startswith("[") and token.endswith("]")):
        return token
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else _FOLLOWS + token


def _special(
    name: str, usual: str, ids: Mapping[str, int | None], pieces: Sequence[str], vocabulary: Mapping[str, int]
) -> str:
    index = ids.get(name)
    if index is None:
        index = vocabulary.get(usual)
    if index is None:
        raise ModelFileError(f"the GGUF file's vocabulary has no {usual}: tokenizer.ggml.{name}_token_id is missing")
    return pieces[index]


def _has_capitals(piece: str) -> bool:
    return not (piece.startswith("[") and piece.endswith("]")) and any(letter.isupper() for letter in piece)
