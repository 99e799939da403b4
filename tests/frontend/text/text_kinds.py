"""Tokenizers of every kind, out of one list of words: they differ in what the text of a token depends on."""

from collections.abc import Callable
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from frontend.text.tokenizer import Tokenizer
from ipc.files.gguf_vocabulary import build_gguf_tokenizer, merges_of_scores
from ipc.files.model_files import read_tokenizer_files, resolve_model
from tests.frontend.text.sentencepiece_vocabulary import sentencepiece_metadata

_SPECIAL = ["<unk>", "<s>", "</s>"]
_WORDS = ["Hello", "wor", "the", "cat", "fox", "does", "it", "is", "on", "dog", "naïve", "café"]
#: Beginnings of words, so that words are found by merging; the shortest first, as training finds them.
_PIECES = sorted({("▁" + word)[:end] for word in _WORDS for end in range(2, len(word) + 2)} | {"ld", "▁▁"}, key=len)
_TOKENS = [
    *_SPECIAL,
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *_PIECES,
    "▁",
    *sorted(set("".join(_WORDS) + ",.!'你好")),
]
_TYPES = [2, 3, 3] + [6] * 256 + [1] * (len(_TOKENS) - 259)
_SCORES = [0.0] * 259 + [-float(index) for index in range(len(_TOKENS) - 259)]


def _gguf(**changes: object) -> Tokenizer:
    metadata = sentencepiece_metadata(tokens=_TOKENS, token_type=_TYPES, scores=_SCORES, **changes)
    return Tokenizer(build_gguf_tokenizer(metadata), bos_token_id=1, eos_token_ids=[2])


def _bpe(*, byte_fallback: bool = True) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(_TOKENS)}
    merges = merges_of_scores(vocabulary, _SCORES, _TYPES)
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=byte_fallback, unk_token="<unk>"))


def _with_specials(hf: tokenizers.Tokenizer) -> Tokenizer:
    hf.add_special_tokens(_SPECIAL)
    return Tokenizer(hf, bos_token_id=1, eos_token_ids=[2])


def _metaspace(prepend_scheme: str, *, split: bool = True) -> Tokenizer:
    """The pre-tokenizer and decoder that newer converters write."""
    hf = _bpe(byte_fallback=False)
    hf.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=split)
    hf.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return _with_specials(hf)


def _llama2() -> Tokenizer:
    """Llama 2's tokenizer.json: spaces by the normalizer, bytes for unknown characters."""
    hf = _bpe()
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    hf.decoder = decoders.Sequence(steps)
    return _with_specials(hf)


def _unigram() -> Tokenizer:
    """T5's and XGLM's kind."""
    scores = [(token, -float(index)) for index, token in enumerate(_TOKENS)]
    hf = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    hf.pre_tokenizer = pre_tokenizers.Metaspace()
    hf.decoder = decoders.Metaspace()
    return _with_specials(hf)


def _word_piece() -> Tokenizer:
    """BERT's kind: words begin bare, go on with ##; the decoder puts spaces between them."""
    starts = sorted({piece.replace("▁", "") for piece in _TOKENS[259:]} - {""})
    words = ["[UNK]", "[CLS]", "[SEP]", *starts, *("##" + word for word in starts)]
    vocabulary = {word: index for index, word in enumerate(words)}
    hf = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    hf.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    hf.decoder = decoders.WordPiece()
    hf.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return Tokenizer(hf, bos_token_id=1, eos_token_ids=[2])


def _bytes_in_a_sequence() -> Tokenizer:
    """Byte-level, with a decoder that is not the plain one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate([*_SPECIAL, *alphabet])}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.Sequence([decoders.ByteLevel()])
    return _with_specials(hf)


_BUILT: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: Tokenizer.from_files(read_tokenizer_files(resolve_model(None))),
    "byte level in a sequence": _bytes_in_a_sequence,
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "metaspace never": lambda: _metaspace("never", split=False),
    "llama 2": _llama2,
    "gguf llama": _gguf,
    "gguf gemma": lambda: _gguf(add_space_prefix=False),
    "unigram": _unigram,
    "word piece": _word_piece,
}
KINDS = tuple(_BUILT)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer, which is made when a test first needs it: making some starts threads."""
    return _BUILT[kind]()
