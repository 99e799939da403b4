"""The bytes that each token of a vocabulary stands for, read from a model's tokenizer files."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import GgufValue

_SPACE = "▁"  # SentencePiece's
#: llama.cpp's types of tokens that are not text: 2 unknown, 3 control, 5 unused.
_SPECIAL_TYPES = (2, 3, 5)
_NORMAL = 1


class TokenBytes(NamedTuple):
    """A vocabulary as bytes."""

    tokens: list[bytes]  # by id; b"" = no token has this id. For a special token: its name
    special: list[int]  # ids of the tokens that are not text


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that are read here."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def added_tokens(content: bytes) -> dict[str, int]:
    """Return the ids of the tokens that a tokenizer.json adds to its vocabulary, by text. Errors: ModelFileError."""
    try:
        file = msgspec.json.decode(content, type=_AddedTokens)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"tokenizer.json is not a tokenizer: {error}") from error
    return {token.content: token.id for token in file.added_tokens}


def token_bytes_of_json(content: bytes) -> TokenBytes:
    """Return the vocabulary of a tokenizer.json.

    Errors: ModelFileError; UnsupportedModelError for a vocabulary whose tokens are not bytes.
    """
    try:
        file = msgspec.json.decode(content, type=_TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"tokenizer.json is not a tokenizer: {error}") from error
    vocab = file.model.vocab
    ids = vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
    added = {token.content: token.id for token in file.added_tokens}
    size = 1 + max([*ids.values(), *added.values()], default=-1)
    texts = [""] * size
    for token, index in {**ids, **added}.items():
        if not 0 <= index < size:
            raise ModelFileError(f"tokenizer.json gives the token {token!r:.80} the id {index}")
        texts[index] = token
    decoder = "" if file.decoder is None else repr(file.decoder)
    special = [token.id for token in file.added_tokens if token.special]
    return TokenBytes(_to_bytes(texts, decoder), special)


def _to_bytes(texts: Sequence[str], decoder: str) -> list[bytes]:
    """Return the bytes of tokens, following the steps of the tokenizer's decoder."""
    if "'ByteLevel'" in decoder:
        return [byte_level_bytes(text) for text in texts]
    if "'ByteFallback'" in decoder or "'Metaspace'" in decoder or _SPACE in decoder:
        return [_sentencepiece_bytes(text) for text in texts]
    raise UnsupportedModelError("the tokens of this model's vocabulary are not bytes: its decoder has no such step")


def token_bytes_of_gguf(metadata: Mapping[str, GgufValue]) -> TokenBytes:
    """Return the vocabulary of a GGUF file. Errors: as for token_bytes_of_json()."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        raise ModelFileError("the GGUF file has no tokenizer: tokenizer.ggml.tokens is missing")
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(f"the bytes of tokens in a GGUF vocabulary of kind {kind!r} are not known")
    read = byte_level_bytes if kind == "gpt2" else _sentencepiece_bytes
    kinds = types if isinstance(types, list) else [_NORMAL] * len(tokens)
    special = [index for index, kind in enumerate(kinds[: len(tokens)]) if kind in _SPECIAL_TYPES]
    return TokenBytes([read(str(token)) for token in tokens], special)


def is_byte_token(token: bytes) -> bool:
    """Return whether this is the name of a byte-fallback token."""
    return len(token) == 6 and token.startswith(b"<0x") and token.endswith(b">")


def _sentencepiece_bytes(token: str) -> bytes:
    name = token.encode()
    with contextlib.suppress(ValueError):  # a text of this form without hexadecimal digits
        if is_byte_token(name):
            return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[int, int]:
    """Return the map from character to byte in the names of byte-level tokens.

    GPT-2 writes printable Latin-1 as itself and maps the other bytes, in order, to the code points from 256 on. The
    Latin-1 characters that do not name a byte are mapped to a character outside Latin-1.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    outside = dict.fromkeys(others, 0x100)
    return outside | {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token.

    Added tokens are written in plain text. One character outside the byte alphabet marks such a token (the library's
    rule).
    """
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
