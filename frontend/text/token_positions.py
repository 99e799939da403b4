"""TokenPositions: how many of a sequence's tokens are needed until its first characters are final."""

from collections.abc import Sequence

from frontend.text.detokenizer import token_stream
from frontend.text.tokenizer import Tokenizer

_AT_ONCE = 64  # tokens, while the position is not among them


class TokenPositions:
    """See the module's docstring. The text is decoded a second time, only as far as needed.

    context: the result of prompt_context() for the tokens before the first, with the same skip_special_tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> None:
        self.num_tokens = 0
        self._stream = token_stream(tokenizer, skip_special_tokens, context)
        self._waiting: list[int] = []  # tokens that are not in the stream yet
        self._num_before = self._num_chars = 0  # tokens in the stream, and the number of characters final with them

    def take(self, ids: Sequence[int]) -> None:
        """Take further tokens."""
        self.num_tokens += len(ids)
        self._waiting += ids

    def tokens_for(self, num_chars: int) -> int:
        """Return the number of tokens after which this many characters are final, at most all. Later calls must not ask
        for fewer.
        """
        size = _AT_ONCE
        while self._waiting and self._num_chars < num_chars:
            ids, before = self._waiting[:size], self._stream.copy()
            new = len(self._stream.push(ids))
            if len(ids) > 1 and (not new or self._num_chars + new >= num_chars):  # the position may be among them
                self._stream, size = before, len(ids) // 2
                continue
            self._num_chars += new
            self._num_before += len(ids)
            del self._waiting[: len(ids)]
            size = min(2 * size, _AT_ONCE)
        return self._num_before
