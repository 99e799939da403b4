"""build_vocabulary(): a model's vocabulary, as llguidance needs it."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import tokenizers

from core.grammars.check_messages import Vocabulary
from ipc.errors import ModelFileError
from ipc.files.gguf import parse_gguf_metadata
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import GGUF_HEADER
from ipc.files.tokenizer_json import parse_tokenizer_json
from ipc.token_bytes import TokenBytes, token_bytes_of_gguf, token_bytes_of_json

if TYPE_CHECKING:
    from llguidance import LLTokenizer


#: Texts that nothing splits, and so sets of tokens that are allowed or forbidden together: pieces of JSON's strings.
#: Strings with a maxLength need both, all others the second. Each one more takes its time when a vocabulary is made.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}']

#: Seconds after which the thread that makes a vocabulary gives Python's lock to a step; Python's own 5 ms, some times
#: in each step, would be seen.
_SWITCH_S = 0.0005


class _Wrapper:
    """The interface through which llguidance reads a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, found: TokenBytes, eos_token_ids: tuple[int, ...]) -> None:
        # EOS is no text, whatever the files say: a grammar must not allow it where its name is.
        ends = [token for token in eos_token_ids if token < len(found.tokens)]
        self.tokens, self.special_token_ids = found.tokens, sorted({*found.special, *ends})
        self.eos_token_id = eos_token_ids[0]
        self.divide: Callable[[str], list[int]] = lambda text: []  # set before a grammar is compiled

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text; llguidance asks for them where a grammar forces a text."""
        return self.divide(text)


def build_vocabulary(parts: Vocabulary, *, is_exact: bool) -> "LLTokenizer":
    """Return a vocabulary; ids without a token are never allowed.

    is_exact: forced texts are divided into tokens as the model's tokenizer does, and not by the longest tokens, which
    is quicker to make. Errors: ImportError without llguidance; ModelFileError for files without a tokenizer;
    UnsupportedModelError for a vocabulary whose tokens are not bytes.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return _build(parts, is_exact=is_exact)
    finally:
        sys.setswitchinterval(before)


def _build(parts: Vocabulary, *, is_exact: bool) -> "LLTokenizer":
    from llguidance import LLTokenizer

    files, eos_token_ids = parts.files, parts.eos_token_ids
    build: Callable[[], tokenizers.Tokenizer]
    if "tokenizer.json" in files:
        content = files["tokenizer.json"]
        found, build = token_bytes_of_json(content), lambda: parse_tokenizer_json(content)
    elif GGUF_HEADER in files:
        metadata = parse_gguf_metadata(files[GGUF_HEADER])
        found, build = token_bytes_of_gguf(metadata), lambda: build_gguf_tokenizer(metadata)
    else:
        raise ModelFileError("the model has no tokenizer")
    wrapper, size = _Wrapper(found, eos_token_ids), max(parts.vocab_size, len(found.tokens))
    # In two parts, as each holds Python's lock from its beginning to its end, and steps wait for it.
    whole = LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_token_ids), slices=[])  # type: ignore[arg-type]
    sliced = whole.with_slices(_SLICES)
    wrapper.divide = _exact(build()) if is_exact else whole.greedy_tokenize
    return sliced


def _exact(tokenizer: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # their names in a text are text
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
