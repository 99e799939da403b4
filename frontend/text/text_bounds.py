"""TextBound: the fewest tokens that a text can have, so that a text that is too long is refused without being
tokenized.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import models, pre_tokenizers

from ipc.files.token_bytes import byte_level_bytes

#: Steps before the model that lose nothing of a text: each writes at least as many bytes as it reads.
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Prepend", "Sequence")
#: NFC joins up to three letters of three bytes into one syllable of three bytes (Hangul).
_NFC_BYTES = 3


class TextBound(NamedTuple):
    """A lower bound of a text's tokens. longest: most bytes of text in one token; 0 = any number."""

    longest: int = 0
    lost: bytes = b""  # bytes that the vocabulary does not have, so they become no token

    def fewest_tokens(self, text: str) -> int:
        """Return the fewest tokens that the text can have."""
        if not self.longest:
            return 0
        num_bytes = len(text.encode(errors="replace").translate(None, self.lost))
        return -(-num_bytes // self.longest)


def text_bound(hf: tokenizers.Tokenizer) -> TextBound:
    """Return the bound of a tokenizer.

    It exists for byte vocabularies after steps that drop nothing. Others have an unknown token for any number of
    characters, or remove spaces.
    """
    model = hf.model
    steps = [*_steps(hf.normalizer), *_steps(hf.pre_tokenizer)]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if not isinstance(model, models.BPE) or not all(_keeps_all(step) for step in steps):
        return TextBound()
    added = hf.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they absorb the spaces next to them
        return TextBound()
    if is_byte_level:
        lost = bytes(byte for byte, name in _byte_names().items() if hf.token_to_id(name) is None)
    elif model.byte_fallback and all(hf.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        lost = b""
    else:
        return TextBound()
    names = hf.get_vocab(with_added_tokens=False)
    longest = max(len(name) if is_byte_level else len(name.encode()) for name in names)  # one letter per byte
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return TextBound(longest * (_NFC_BYTES if any(step["type"] == "NFC" for step in steps) else 1), lost)


def _byte_names() -> dict[int, str]:
    """Return the letter by which a byte-level vocabulary writes each byte."""
    return {byte_level_bytes(name)[0]: name for name in pre_tokenizers.ByteLevel.alphabet()}


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer, and of those inside it."""
    if part is not None:
        yield from _flat(msgspec.json.decode(part.__getstate__()))


def _flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield settings
    for inner in [*settings.get("normalizers", ()), *settings.get("pretokenizers", ())]:
        yield from _flat(inner)


def _keeps_all(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Split":
        return bool(step.get("behavior") != "Removed")
    if kind == "Replace":
        pattern = step.get("pattern", {}).get("String")
        return pattern is not None and len(step.get("content", "").encode()) >= len(pattern.encode())
    return kind in _KEEPING or kind == "NFC"
