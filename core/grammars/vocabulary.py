"""Vocabulary: a model's tokens as llguidance needs them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: Return the token ids of a text.
Divide: TypeAlias = Callable[[str], list[int]]

#: Texts that nothing splits, and so sets of tokens that are allowed or forbidden together: pieces of JSON's strings.
#: Strings with a maxLength need both, all others the second. Each one more takes its time when a vocabulary is made.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}']


#: Characters of a forced text that are divided as the model's tokenizer does it. A mask allows the first token alone,
#: and the text behind it is divided anew. A grammar may force hundreds of thousands of characters.
_DIVIDED = 512
#: Characters of a forced text at most. llguidance fails a longer one when it gets no tokens for it, before it has taken
#: tens of milliseconds of a step.
MAX_FORCED_CHARS = 16_384


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The tokens of a model; an id without a token is never allowed."""

    tokens: list[bytes]  # by id; b"" = no token has this id. Of a special token: its name
    special: list[int]  # ids of the tokens that are not text
    size: int  # ids
    eos_token_ids: tuple[int, ...]


class _Wrapper:
    """The interface through which llguidance reads a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.tokens, vocabulary.special
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.divide: Divide = lambda text: []  # these are set before a grammar is compiled
        self.divide_rest: Divide = lambda text: []

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text; llguidance asks for them where a grammar forces a text."""
        if len(text) <= _DIVIDED:
            return self.divide(text)
        if len(text) > MAX_FORCED_CHARS:
            return []
        return self.divide(text[:_DIVIDED]) + self.divide_rest(text[_DIVIDED:])


def build_vocabulary(
    vocabulary: Vocabulary, build: Callable[[], Divide] | None = None, *, in_parts: bool = True
) -> "LLTokenizer":
    """Return the vocabulary for llguidance.

    build: returns what divides forced texts into tokens; None: the longest tokens do, which is quicker to make.
    in_parts: in two calls, which take a third more time together. Each holds Python's lock from its beginning to its
    end, and steps wait for it.
    """
    from llguidance import LLTokenizer

    wrapper, ends = _Wrapper(vocabulary), list(vocabulary.eos_token_ids)
    slices = [] if in_parts else _SLICES
    made = LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=ends, slices=slices)  # type: ignore[arg-type]
    if in_parts:
        made = made.with_slices(_SLICES)
    wrapper.divide_rest = made.greedy_tokenize
    wrapper.divide = made.greedy_tokenize if build is None else build()
    return made
