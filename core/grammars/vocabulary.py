"""Vocabulary: a model's tokens in the form that llguidance needs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: Returns the token ids of a text.
Divide: TypeAlias = Callable[[str], list[int]]

#: Texts that are never split, so that sets of tokens are allowed or forbidden together: pieces of JSON strings. Strings
#: with a maxLength need both, all others the second. Each additional one makes building a vocabulary slower.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}']


#: Characters of a forced text that are tokenized like the model's tokenizer does. A mask allows only the first token,
#: and the text after it is tokenized again. A grammar may force hundreds of thousands of characters.
_DIVIDED = 512
#: The most characters of a forced text. If it gets no tokens for a longer one, llguidance fails it before it has used
#: tens of milliseconds of a step.
MAX_FORCED_CHARS = 16_384


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """A model's tokens. An id without a token is never allowed."""

    tokens: list[bytes]  # by id; b"" = no token has this id. For a special token: its name
    special: list[int]  # ids of tokens that are not text
    size: int  # number of ids
    eos_token_ids: tuple[int, ...]


class _Wrapper:
    """The interface through which llguidance uses a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.divide: Divide = lambda text: []  # both are set before a grammar is compiled
        self.divide_rest: Divide = lambda text: []

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text. llguidance calls it if a grammar forces a text."""
        if len(text) <= _DIVIDED:
            return self.divide(text)
        if len(text) > MAX_FORCED_CHARS:
            return []
        return self.divide(text[:_DIVIDED]) + self.divide_rest(text[_DIVIDED:])


def build_vocabulary(vocabulary: Vocabulary, divide: Divide | None = None, *, in_parts: bool = True) -> "LLTokenizer":
    """Return the vocabulary for llguidance.

    divide: splits forced texts into tokens; None: the longest tokens are used.
    in_parts: build in two calls, which together take a third more time. Each call holds the GIL from start to end, and
    steps wait for it.
    """
    from llguidance import LLTokenizer

    wrapper, ends = _Wrapper(vocabulary), list(vocabulary.eos_token_ids)
    slices = [] if in_parts else _SLICES
    made = LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=ends, slices=slices)  # type: ignore[arg-type]
    if in_parts:
        made = made.with_slices(_SLICES)
    wrapper.tokens = []  # llguidance has copied them, and keeps the wrapper
    wrapper.divide_rest = made.greedy_tokenize
    wrapper.divide = divide or made.greedy_tokenize
    return made
