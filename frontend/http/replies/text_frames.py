"""TextFrames: the ready-made bytes around the text of a plain event, and the JSON of each token's text.

Most tokens of a byte-level vocabulary are whole characters. JSON escapes each character by itself, so the JSON of a
text of such tokens is that of the tokens, concatenated: it is looked up, and no text is made. Other tokens go through
the detokenizer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from frontend.http.replies.answer_format import json_bytes
from frontend.text.tokenizer import TokenTable


class TokenJson(dict[int, bytes | None]):
    """A map from token id to the JSON of its text without the quotes; None if the token is not made of whole
    characters.

    It is filled on first use. b"" = the token adds nothing.
    """

    def __init__(self, table: TokenTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> bytes | None:
        try:
            found: bytes | None = json_bytes(self._table[token_id].decode())[1:-1]
        except UnicodeDecodeError:
            found = None
        if token_id in self._table:  # it has no unknown ids, so this map stays within the vocabulary's size
            self[token_id] = found
        return found

    def join(self, ids: Sequence[int]) -> bytes | None:
        """Return the JSON of these tokens' text without the quotes; None if one is not made of whole characters."""
        if len(ids) == 1:
            return self[ids[0]]
        parts = [self[token_id] for token_id in ids]
        return None if None in parts else b"".join(parts)  # type: ignore[arg-type]


class TextFrames(NamedTuple):
    """The bytes around the text of each choice's plain events, including quotes: heads[choice] + text + tail."""

    heads: Sequence[bytes]
    tail: bytes
    table: TokenJson


class FramedFormat:
    """The base of an AnswerFormat with plain events: those of a continuing choice, with only its new text."""

    def text_frames(self) -> TextFrames | None:
        """Return the frames of this reply; None if piece() makes all of its events."""
        return None
