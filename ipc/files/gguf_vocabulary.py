"""GGUF vocabularies: build a `tokenizers.Tokenizer` from a GGUF file's metadata.

A GGUF file has no tokenizer.json. It names a vocabulary kind (`tokenizer.ggml.model`) and a pre-tokenizer
(`tokenizer.ggml.pre`: ipc/files/gguf_pre_tokenizers.py), and lists tokens, token types and merges. SentencePiece
vocabularies have scores instead of merges (ipc/files/gguf_sentencepiece.py, and ipc/files/gguf_unigram.py), and a
WordPiece one neither (ipc/files/gguf_wordpiece.py).
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import GgufValue
from ipc.files.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from ipc.files.gguf_sentencepiece import build_sentencepiece, merges_of_scores
from ipc.files.gguf_unigram import build_unigram
from ipc.files.gguf_wordpiece import build_wordpiece

# Token types of llama.cpp: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

_Item = TypeVar("_Item", str, int, float)


def build_gguf_tokenizer(metadata: Mapping[str, GgufValue]) -> tokenizers.Tokenizer:
    """Return the tokenizer that this metadata describes: "gpt2" is byte-level BPE, "llama" is SentencePiece with
    merges by scores, "t5" SentencePiece's unigram model, "bert" is WordPiece.

    Control tokens and the unknown token become special tokens. User-defined ones (`<think>`) become added tokens, which
    are matched whole but are part of the text. Errors: UnsupportedModelError naming a vocabulary or pre-tokenizer that
    is not supported; ModelFileError for lists that are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelFileError("the GGUF file has no tokenizer: tokenizer.ggml.model is missing")
    if kind not in ("gpt2", "llama", "t5", "bert"):
        raise UnsupportedModelError(
            f"the GGUF file's vocabulary is of kind {kind!r}; only 'gpt2' (byte-level BPE), 'llama' (SentencePiece "
            "with scores), 't5' (unigram) and 'bert' (WordPiece) are supported"
        )
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelFileError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} tokens twice")
    types = _per_token(metadata, "tokenizer.ggml.token_type", int, tokens, default=_NORMAL)
    if kind == "bert":
        names = ("cls", "seperator", "unknown")
        return build_wordpiece(tokens, types, {name: gguf_token_id(metadata, name) for name in names})
    if kind == "t5":
        tokenizer = _unigram(metadata, tokens)
    else:
        is_llama = kind == "llama"
        tokenizer = _sentencepiece(metadata, vocabulary, types) if is_llama else _byte_level(metadata, vocabulary)
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
    )
    _add_ends(tokenizer, tokens, metadata)
    return tokenizer


def gguf_token_id(metadata: Mapping[str, GgufValue], name: str) -> int | None:
    """Return the id under `tokenizer.ggml.<name>_token_id`; None when the file does not name one. Errors:
    ModelFileError.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < count:
        raise ModelFileError(f"{key} is {token_id!r}; the vocabulary has {count} tokens")
    return token_id


def _byte_level(metadata: Mapping[str, GgufValue], vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    pre = _pre_tokenizer(metadata)
    merges = _merges(_list(metadata, "tokenizer.ggml.merges", str), vocabulary)
    # Llama 3's vocabulary has words its merges cannot reach; its own tokenizer.json looks words up whole first.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignores_merges))
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(metadata: Mapping[str, GgufValue]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF file's pre-tokenizer is {name!r}; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(
    metadata: Mapping[str, GgufValue], vocabulary: dict[str, int], types: Sequence[int]
) -> tokenizers.Tokenizer:
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if metadata.get(key):
            raise UnsupportedModelError(f"the GGUF file's tokenizer normalizes text by {key}, which is not supported")
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(_list(metadata, "tokenizer.ggml.merges", str), vocabulary)
    else:
        scores = _per_token(metadata, "tokenizer.ggml.scores", float, list(vocabulary))
        merges = merges_of_scores(vocabulary, scores, types)
    return build_sentencepiece(
        vocabulary,
        merges,
        unknown=gguf_token_id(metadata, "unknown"),
        add_space_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", default=True),
    )


def _unigram(metadata: Mapping[str, GgufValue], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    scores = _per_token(metadata, "tokenizer.ggml.scores", float, tokens)
    key = "tokenizer.ggml.precompiled_charsmap"
    characters = _list(metadata, key, int) if metadata.get(key) else []
    if any(not 0 <= byte < 256 for byte in characters):
        raise ModelFileError(f"{key} must hold only bytes")
    return build_unigram(tokens, scores, gguf_token_id(metadata, "unknown"), characters)


def _merges(lines: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Read and check the merges. The library panics (an exception outside Exception) on a merge whose result is no
    token.
    """
    merges = []
    for index, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelFileError(
                f"tokenizer.ggml.merges[{index}] is {line!r}; it must be two tokens of the vocabulary, "
                "separated by a space, that make a third"
            )
        merges.append((left, right))
    return merges


def _add_ends(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], metadata: Mapping[str, GgufValue]) -> None:
    """Set the tokens before and after an encoded text: BOS and EOS where the file or its kind asks for them."""
    ids = {name: gguf_token_id(metadata, name) for name in ("bos", "eos")}
    kind = metadata["tokenizer.ggml.model"]
    adds_bos = kind == "llama" or (kind == "gpt2" and _pre_tokenizer(metadata).adds_bos and ids["bos"] is not None)
    ends: dict[str, tuple[str, int]] = {}
    adds_eos = kind == "t5"
    for name, default in (("bos", adds_bos), ("eos", adds_eos)):
        if not _flag(metadata, f"tokenizer.ggml.add_{name}_token", default=default):
            continue
        token_id = ids[name]
        if token_id is None:
            raise ModelFileError(f"{name.upper()} is to be added but tokenizer.ggml.{name}_token_id is missing")
        ends[name] = tokens[token_id], token_id
    if ends:
        before, after = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[*ends.values()]
        )


def _flag(metadata: Mapping[str, GgufValue], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{key} must be true or false, got {value!r:.80}")
    return value


def _per_token(
    metadata: Mapping[str, GgufValue],
    key: str,
    item: type[_Item],
    tokens: Sequence[str],
    default: _Item | None = None,
) -> list[_Item]:
    """Return a list with an entry for each token; `default` for all where the file has none."""
    if key not in metadata and default is not None:
        return [default] * len(tokens)
    values = _list(metadata, key, item)
    if len(values) != len(tokens):
        raise ModelFileError(f"{key} has {len(values)} entries for {len(tokens)} tokens")
    return values


def _list(metadata: Mapping[str, GgufValue], key: str, item: type[_Item]) -> list[_Item]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise ModelFileError(
            f"the GGUF file's tokenizer is incomplete: {key} must be a list, got {type(values).__name__}"
        )
    checked = [value for value in values if isinstance(value, item)]
    if len(checked) != len(values):
        raise ModelFileError(f"{key} must hold only {item.__name__} values")
    return checked
