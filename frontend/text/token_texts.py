"""TokenTexts: the text of each token at its position. A token that is part of a character shows what it completes."""

import codecs
from collections.abc import Sequence

from frontend.text.prompt_context import text_behind
from frontend.text.tokenizer import Tokenizer

#: Number of earlier tokens that may begin a token's character: a character has up to 4 bytes and a token at least one.
_UNFINISHED_TOKENS = 3


class TokenTexts:
    """The texts of the tokens of one sequence, position after position.

    context: the result of prompt_context() for the tokens before the first, with the same skip_special_tokens.

    The texts of the sequence's own tokens, concatenated, are the text of the sequence, except for U+FFFD. A token that
    is part of a character shows the characters that it completes together with the tokens before it. It does not show
    an unfinished character, so its text may be empty. U+FFFD is shown only for that character itself, and by
    vocabularies that are neither bytes nor fall back to them. Special tokens that the text skips show their names.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_table(skip_special_tokens)
        self._before: list[int] = []  # the last token that added something to the text; at most one
        self._pending = b""  # at most 3 bytes: the beginning of a character
        for token_id in context[-_UNFINISHED_TOKENS:]:
            self.take([token_id])

    def take(self, ids: Sequence[int]) -> list[str]:
        """Return the texts of the tokens at the next position: the sequence's own first, then alternatives."""
        texts, pending = [], b""
        for index, (token_id, text) in enumerate(zip(ids, self._decode_each(ids), strict=True)):
            data = self._tokenizer.bytes_of(token_id) if self._pending or "\ufffd" in text else None
            rest = b""
            if data is not None:
                whole = self._pending + data
                text, used = codecs.utf_8_decode(whole, "ignore", False)
                rest = whole[used:]
            texts.append(text)
            if index == 0:
                pending = rest
        if self._table[ids[0]]:
            self._pending, self._before = pending, [ids[0]]
        return texts

    def _decode_each(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each id adds to the token before. Bytes that are not a complete character are U+FFFD."""
        if self._tokenizer.is_byte_level or not self._before:
            return self._tokenizer.decode_batch([[token_id] for token_id in ids])
        before, *texts = self._tokenizer.decode_batch([self._before, *([*self._before, token_id] for token_id in ids)])
        return [text_behind(before, text) for text in texts]
