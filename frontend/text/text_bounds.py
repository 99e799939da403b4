"""TextBound: the fewest tokens that a text can have, so that one that is too long is known without being read.

And where a long text can be cut, so that its parts are tokenized one after the other, in the memory of one of them.
"""

import re
from collections.abc import Iterator
from itertools import islice
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


#: Where all known patterns for words begin another word: between a letter and a space before a letter; and between a
#: letter and a line's end, or a mark of Chinese and Japanese.
_CUTS = r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=[A-Za-z\u3041-\u30ff\u4e00-\u9fff])(?=[\n\u3001\u3002\uff0c])"
_BETWEEN_DIGITS = r"|(?<=[0-9])(?=[0-9])"  # if each is a word of its own
#: Steps that find the next word by what follows the last one, so that a word does not depend on those before it.
_FORWARD = ("ByteLevel", "Digits", "NFC", "Sequence", "Split")
#: Characters before and behind a cut that are split into words to check it. No known pattern has a word of two words.
_BEFORE, _BEHIND = 64, 32
_TRIES = 8  # cuts


class TextCuts:
    """Where texts of one tokenizer can be cut. pattern: of the places to try."""

    def __init__(self, hf: tokenizers.Tokenizer, pattern: str) -> None:
        self._hf, self._pattern = hf, re.compile(pattern)

    def parts_of(self, text: str, most: int) -> Iterator[str]:
        """Yield a text in parts of at most this many characters, or more if no cut is found."""
        begin, half = 0, most // 2
        while len(text) - begin > most:
            found = (end for window in range(begin + half, len(text), half) for end in self._cuts(text, window, half))
            end = next(found, len(text))
            yield text[begin:end]
            begin = end
        if begin < len(text):
            yield text[begin:]

    def _cuts(self, text: str, begin: int, count: int) -> Iterator[int]:
        """Yield the cuts in a window of `count` characters. Few are tried: the first one is nearly always right."""
        for found in islice(self._pattern.finditer(text, begin, begin + count), _TRIES):
            if self._is_between_words(text, found.start()):
                yield found.start()

    def _is_between_words(self, text: str, at: int) -> bool:
        """Return whether no word goes on behind `at`, wherever before it the word begins."""
        behind = self._words(text[at : at + _BEHIND])
        return all(
            self._words(text[begin : at + _BEHIND]) == self._words(text[begin:at]) + behind
            for begin in range(max(0, at - _BEFORE), at)
        )

    def _words(self, text: str) -> list[str]:
        if self._hf.normalizer is not None:
            text = self._hf.normalizer.normalize_str(text)
        return [word for word, _ in self._hf.pre_tokenizer.pre_tokenize_str(text)]


def text_cuts(hf: tokenizers.Tokenizer) -> TextCuts | None:
    """Return the cuts at which the parts of any text have, together, the tokens of the whole; None = none are known."""
    steps = [*_steps(hf.normalizer), *_steps(hf.pre_tokenizer)]
    pattern = _CUTS + (_BETWEEN_DIGITS if any(step.get("individual_digits") for step in steps) else "")
    added = hf.get_added_tokens_decoder().values()
    if (
        not isinstance(hf.model, models.BPE)  # what it does within a word does not depend on other words
        or not any(step["type"] == "Split" or step.get("use_regex") for step in steps)
        or not all(_looks_forward(step) for step in steps)
        or any(token.lstrip or token.rstrip or token.single_word for token in added)
        or any(re.search(pattern, token.content) for token in added)
    ):
        return None
    return TextCuts(hf, pattern)


def _looks_forward(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Split":
        pattern = step.get("pattern", {}).get("Regex", "(?<")
        groups = pattern.replace("(?!\\S)", "").replace("(?i:", "").replace("(?:", "")
        return step.get("behavior") == "Isolated" and "(?" not in groups
    return kind in _FORWARD and not step.get("add_prefix_space")


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
