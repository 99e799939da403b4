"""TokenTexts: the text of each token where it stands: one that is a part of a character shows what it completes."""

import codecs
from collections.abc import Sequence

from frontend.text.tokenizer import Tokenizer

#: A character has up to 4 bytes and a token at least one: so many tokens before may be its beginning.
_CONTEXT_TOKENS = 3


class TokenTexts:
    """Goes through one sequence, position after position; `before`: the tokens in front of the first.

    A token alone that is whole characters has its own text anywhere. Of one that is not, the characters are shown that
    it completes together with the tokens before it, without what it leaves unfinished: perhaps nothing. U+FFFD is
    shown only for the character of that name, and by vocabularies that are neither bytes nor fall back to them.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pending = b""  # at most 3 bytes: the beginning of a character
        for token_id in before[-_CONTEXT_TOKENS:]:
            self.take([token_id])

    def take(self, ids: Sequence[int]) -> list[str]:
        """Texts of the tokens at the next position: the one that stands there first, then others that might have."""
        alone = self._tokenizer.decode_each(ids)
        texts, pending = [], b""
        for index, (token_id, text) in enumerate(zip(ids, alone, strict=True)):
            data = self._tokenizer.bytes_of(token_id) if "\ufffd" in text else None
            rest = b""
            if data is not None:
                whole = self._pending + data
                text, used = codecs.utf_8_decode(whole, "ignore", False)
                rest = whole[used:]
            texts.append(text)
            if index == 0:
                pending = rest
        self._pending = pending
        return texts
