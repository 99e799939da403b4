"""Detokenizer: the text of one request, which grows as its tokens arrive and is cut at a stop string.

Text is shown only once no later token can change it. The bytes of an unfinished character wait. With stop strings, the
last characters also wait if a stop string could begin with them.

An output continues its prompt. Its text is the text of prompt and output together, without the part that equals the
beginning of the text of the prompt alone. So the two texts together are the text of all tokens. There is one exception:
a prompt that ends in the middle of a character that the output completes. The whole character then belongs to the
output.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from frontend.text.prompt_context import CONTEXT_TOKENS, text_behind
from frontend.text.tokenizer import Tokenizer, TokenTable
from ipc.files.token_bytes import is_byte_token
from ipc.tables.arrays import Int32s

#: WindowStream decodes unfinished text of up to this many tokens at every push; beyond that, at every doubling.
_EAGER_TOKENS = 16


class TokenStream(Protocol):
    """A stream of tokens that returns settled text.

    The concatenation of all pushes and the flush is the decoding of all the tokens, after the text of a context.
    """

    is_settled: bool  # the text of tokens of whole characters does not depend on what came before them

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is final with these tokens. No later token can change it."""

    def flush(self) -> str:
        """Return the rest, with U+FFFD for bytes that are not a character. Nothing may be pushed afterwards."""

    def copy(self) -> "TokenStream":
        """Return an independent copy."""


class ByteStream:
    """The stream of a byte-level vocabulary. A token is some bytes; the text is their concatenation read as UTF-8.

    It is exact for any ids: Python's decoder replaces invalid bytes as Rust's from_utf8_lossy does (one U+FFFD per
    maximal part of a sequence; Unicode 3.9, table 3-11).
    """

    def __init__(self, table: TokenTable, context: Sequence[int] = ()) -> None:
        self._table = table
        self._pending = b""  # at most 3 bytes: the beginning of a character
        self._is_within_context = False  # the pending character began in the context, whose text has U+FFFD for it
        if context:
            self.push(context)
        self._is_within_context = bool(self._pending)
        self.is_settled = not self._pending  # no character is unfinished

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is final with these tokens."""
        data = self._pending + b"".join(map(self._table.__getitem__, ids))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        shown = self._behind_context(text) if self._is_within_context else text
        self.is_settled = not self._pending and not self._is_within_context
        return shown

    def flush(self) -> str:
        """Return the rest, with U+FFFD for an unfinished character."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        self.is_settled = True
        return self._behind_context(text) if self._is_within_context else text

    def copy(self) -> "ByteStream":
        """Return an independent copy."""
        twin = object.__new__(ByteStream)
        twin.__dict__.update(self.__dict__)
        return twin

    def _behind_context(self, text: str) -> str:
        self._is_within_context = not text
        return text.removeprefix("\ufffd")


class WindowStream:
    """The stream of any other vocabulary. It uses the prefix and read offsets of TGI and vLLM.

    It decodes the last settled tokens (context) and the new ones (pending) together. The part after the context's own
    text is new.

    Tokens stay pending while their text ends in U+FFFD (an unfinished character) or in a byte-fallback token. A run of
    byte-fallback tokens is decoded as a whole: one bad byte later turns all of it into U+FFFD.
    """

    is_settled = False  # a token's text depends on the tokens before it

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_table(skip_special_tokens)
        self._context = list(context)
        self._context_text = self._decode(self._context) if self._context else ""
        self._pending: list[int] = []
        self._next_try = 1  # pending tokens

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is final with these tokens."""
        table = self._table
        self._pending += [token_id for token_id in ids if table[token_id]]
        if len(self._pending) < self._next_try:
            return ""
        if self._tokenizer.has_byte_fallback and is_byte_token(table[self._pending[-1]]):
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith("\ufffd"):
            size = len(self._pending)
            self._next_try = size + 1 if size < _EAGER_TOKENS else 2 * size
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """Return the text of the pending tokens."""
        return self._settle(self._decode(self._context + self._pending)) if self._pending else ""

    def copy(self) -> "WindowStream":
        """Return an independent copy."""
        twin = object.__new__(WindowStream)
        twin.__dict__.update(self.__dict__, _context=self._context.copy(), _pending=self._pending.copy())
        return twin

    def _settle(self, text: str) -> str:
        new = text_behind(self._context_text, text)
        self._context = (self._context + self._pending)[-CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._pending = []
        self._next_try = 1
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        # push() has removed skipped and unknown tokens.
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class Detokenizer:
    """The text of one request.

    context: the result of prompt_context() for its prompt, with the same skip_special_tokens. It is not shown, and no
    stop string may begin in it. `num_tokens` counts the tokens taken: all, or those up to and including the one that
    completed `stop_string`. Of several stop strings, the one that is completed first wins; of those completed at the
    same character, the longest. A stop string must be completed by text that comes after that of the first `min_tokens`
    tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        self.num_tokens = 0
        self.stop_string: str | None = None
        self._stream = token_stream(tokenizer, skip_special_tokens, context)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        # The last characters of the text, in which a stop string may have begun. They are shown at once only if stop
        # strings are part of the output.
        self._num_recent = max(map(len, self._stop), default=1) - 1
        self._recent = ""
        self._shown: list[str] = []
        self._undelivered: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """Return all text that may be shown so far. This costs its length; use delta() for a stream."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def delta(self) -> str:
        """Return the text that may be shown and was not part of an earlier delta."""
        delta = "".join(self._undelivered)
        self._undelivered.clear()
        return delta

    def update(self, token_ids: Sequence[int] | Int32s) -> None:
        """Take further tokens. Tokens after a completed stop string are ignored."""
        assert not self._finished, f"update() after finish(), {self.num_tokens} tokens taken"
        ids: Sequence[int] = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        if self._stop and self.num_tokens < self._min_tokens and self.stop_string is None:
            exempt = self._min_tokens - self.num_tokens
            self._extend(self._stream.push(ids[:exempt]))
            self.num_tokens += len(ids[:exempt])
            ids = ids[exempt:]
        if self.stop_string is None and ids:
            self._advance(ids)

    def skip(self, num_tokens: int) -> bool:
        """Count tokens of whole characters, whose text the caller shows itself, instead of update().

        Return False, and count nothing, if there are stop strings or the text depends on earlier tokens.
        """
        if self._stop or not self._stream.is_settled:
            return False
        self.num_tokens += num_tokens
        return True

    def finish(self) -> None:
        """Show all waiting text, because no more tokens will arrive. This may still complete a stop string."""
        if self._finished:
            return
        self._finished = True
        if self.stop_string is not None:
            return
        rest = self._stream.flush()
        if self.num_tokens > self._min_tokens:
            self._extend_or_stop(rest)
        else:
            self._extend(rest)
        if self.stop_string is None and not self._include_stop:
            self._show(self._recent)

    def _advance(self, ids: Sequence[int]) -> None:
        before = self._stream.copy() if self._stop and len(ids) > 1 else None
        new_chars = self._extend_or_stop(self._stream.push(ids))
        if self.stop_string is not None and before is not None:
            ids = ids[: _tokens_for(before, ids, new_chars)]
        self.num_tokens += len(ids)

    def _extend_or_stop(self, new: str) -> int:
        """Add text, up to a stop string if one is completed in it. Return the number of new characters needed."""
        buffer = self._recent + new
        found = _first_completed(self._stop, buffer, len(self._recent)) if new else None
        if found is None:
            self._extend(new)
            return len(new)
        end, start, self.stop_string = found
        self._show(buffer[len(self._recent) : end] if self._include_stop else buffer[:start])
        return end - len(self._recent)

    def _extend(self, new: str) -> None:
        buffer = self._recent + new
        cut = max(0, len(buffer) - self._num_recent)
        self._show(new if self._include_stop else buffer[:cut])
        self._recent = buffer[cut:]

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._undelivered.append(text)


def _first_completed(stop: Sequence[str], buffer: str, old: int) -> tuple[int, int, str] | None:
    """Find the occurrence of a stop string that ends after buffer[:old] with the smallest end, then the smallest start.

    Returns (end, start, stop string), or None.
    """
    first = None
    for string in stop:
        start = buffer.find(string, max(0, old - len(string) + 1))
        if start >= 0 and (first is None or (start + len(string), start) < first[:2]):
            first = (start + len(string), start, string)
    return first


def token_stream(tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> TokenStream:
    """Return the stream of tokens after this context."""
    if tokenizer.is_byte_level:
        return ByteStream(tokenizer.token_table(skip_special_tokens), context)
    return WindowStream(tokenizer, skip_special_tokens, context)


def _tokens_for(stream: TokenStream, ids: Sequence[int], num_chars: int) -> int:
    """Return how many of the ids are needed until num_chars characters are final."""
    for index, token_id in enumerate(ids):
        num_chars -= len(stream.push((token_id,)))
        if num_chars <= 0:
            return index + 1
    return len(ids)
