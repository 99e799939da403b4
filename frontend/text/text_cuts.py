"""TextBound and TextCuts: what is known of a long text before it is tokenized.

TextBound: the fewest tokens that a text can have, so that one that is too long is known without being read. TextCuts:
where a long text can be cut, so that its parts are tokenized one after the other, in the memory of one of them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
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
#: letter and a line's end, or a mark of Chinese and Japanese. [^\W\d_] is a letter of any script.
_SPACES = r"(?<=[^\W\d_])(?= [^\W\d_])"
_CUTS = r"(?<=[^\W\d_])(?= [^\W\d_]|[\n\u3001\u3002\uff0c])"
_BETWEEN_DIGITS = r"|(?<=[0-9])(?=[0-9])"  # if each is a word of its own
#: Steps that find the next word by what follows the last one, so that a word does not depend on those before it.
_FORWARD = ("ByteLevel", "Digits", "NFC", "Sequence", "Split")
#: Steps that make a word of what is between two spaces, or of a part of that.
_AT_SPACES = ("BertPreTokenizer", "WhitespaceSplit")
#: Steps of SentencePiece's kind and of BERT's, each of which changes a character, or some next to one another.
_NEAR = (*_AT_SPACES, "BertNormalizer", "Metaspace", "NFC", "NFKC", "Precompiled", "Prepend", "Sequence", "Strip")
_SPACE = "\u2581"  # as SentencePiece writes it
#: Characters before and behind a cut that are tokenized to check it. No known pattern has a word of two words.
_BEFORE, _BEHIND = 64, 32
_TRIES = 8  # cuts


class TextCuts:
    """Where texts of one tokenizer can be cut. pattern: of the places to try.

    reads: what the tokenizer makes of a text, which cuts must not change. num_dropped: characters behind a cut that
    belong to no part, because the tokenizer puts them before each text.
    """

    def __init__(self, pattern: str, reads: Callable[[str], Sequence[object]], num_dropped: int = 0) -> None:
        self._pattern, self._reads, self._num_dropped = re.compile(pattern), reads, num_dropped

    def parts_of(self, text: str, most: int) -> Iterator[str]:
        """Yield a text in parts of at most this many characters, or more if no cut is found."""
        begin, half = 0, most // 2
        while len(text) - begin > most:
            found = (end for window in range(begin + half, len(text), half) for end in self._cuts(text, window, half))
            end = next(found, len(text))
            yield text[begin:end]
            begin = end + self._num_dropped
        if begin < len(text):
            yield text[begin:]

    def _cuts(self, text: str, begin: int, count: int) -> Iterator[int]:
        """Yield the cuts in a window of `count` characters. Few are tried: the first one is nearly always right."""
        for found in islice(self._pattern.finditer(text, begin, begin + count), _TRIES):
            if self._is_between_words(text, found.start()):
                yield found.start()

    def _is_between_words(self, text: str, at: int) -> bool:
        """Return whether no word goes on behind `at`, wherever before it the word begins."""
        behind = self._reads(text[at + self._num_dropped : at + _BEHIND])
        return all(
            self._reads(text[begin : at + _BEHIND]) == [*self._reads(text[begin:at]), *behind]
            for begin in range(max(0, at - _BEFORE), at)
        )


def text_cuts(hf: tokenizers.Tokenizer) -> TextCuts | None:
    """Return the cuts at which the parts of any text have, together, the tokens of the whole; None = none are known."""
    steps = [*_steps(hf.normalizer), *_steps(hf.pre_tokenizer)]
    if any((step["type"] == "Split" and step.get("behavior") == "Isolated") or step.get("use_regex") for step in steps):
        return _cuts_of_words(hf, steps)
    return _cuts_of_spaces(hf, steps)


def _cuts_of_words(hf: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> TextCuts | None:
    """Return the cuts of a byte-level tokenizer, whose words are found by a pattern."""
    pattern = _CUTS + (_BETWEEN_DIGITS if any(step.get("individual_digits") for step in steps) else "")
    if (
        not isinstance(hf.model, models.BPE)  # what it does within a word does not depend on other words
        or not all(_looks_forward(step) for step in steps)
        or _has_tokens_across(hf, pattern)
    ):
        return None

    def words(text: str) -> list[str]:
        if hf.normalizer is not None:
            text = hf.normalizer.normalize_str(text)
        return [word for word, _ in hf.pre_tokenizer.pre_tokenize_str(text)]

    return TextCuts(pattern, words)


def _cuts_of_spaces(hf: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> TextCuts | None:
    """Return the cuts of a tokenizer of SentencePiece's or BERT's kind: between a letter and the space before another.

    Words begin there, or a whole text is one word, of which BPE never joins the two sides.
    """
    splits = any(step["type"] in _AT_SPACES or step.get("split") for step in steps)
    if (
        not all(_changes_what_is_near(step) for step in steps)
        or not (splits or (any(_writes_spaces(step) for step in steps) and _merges_apart(hf)))
        or _has_tokens_across(hf, _SPACES)
    ):
        return None

    def ids(text: str) -> list[int]:
        return hf.encode(text, add_special_tokens=False).ids

    return TextCuts(_SPACES, ids, 1 if any(step["type"] == "Prepend" for step in steps) else 0)


def _changes_what_is_near(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {})
    if step["type"] == "Replace":
        return "String" in pattern or pattern.get("Regex") == " {2,}"
    return step["type"] in _NEAR or (step["type"] == "Split" and pattern.get("String") == " ")


def _writes_spaces(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("replacement") == _SPACE)
    return step["type"] == "Replace" and (step["pattern"].get("String"), step.get("content")) == (" ", _SPACE)


def _merges_apart(hf: tokenizers.Tokenizer) -> bool:
    """Return whether BPE never joins a letter and a space behind it, so that neither side of it depends on the other.

    (Unigram does not in a text of any length: it adds up scores from the beginning, and rounds.)
    """
    model = hf.model
    if not isinstance(model, models.BPE) or hf.token_to_id(_SPACE) is None or model.dropout or model.ignore_merges:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    joins = re.compile(rf"[^\W\d_]{_SPACE}")
    return not any(joins.search(name) for name in hf.get_vocab(with_added_tokens=False))


def _has_tokens_across(hf: tokenizers.Tokenizer, pattern: str) -> bool:
    """Return whether an added token may be at a cut, or depends on what is next to it."""
    for token in hf.get_added_tokens_decoder().values():
        content = token.content if hf.normalizer is None else hf.normalizer.normalize_str(token.content)
        takes_space = (token.lstrip and token.content[:1].isalpha()) or (token.rstrip and token.content[-1:].isalpha())
        if takes_space or token.single_word:  # XLM-R's <mask> takes spaces, but none before a letter
            return True
        if any(re.search(pattern, name) for name in (token.content, content.replace(_SPACE, " "))):
            return True
    return False


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
