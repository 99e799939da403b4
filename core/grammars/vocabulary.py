"""build_vocabulary(): a model's vocabulary, as llguidance needs it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import tokenizers

from ipc.errors import ModelFileError
from ipc.files.gguf import parse_gguf_metadata
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import GGUF_HEADER
from ipc.files.tokenizer_json import parse_tokenizer_json
from ipc.token_bytes import TokenBytes, token_bytes_of_gguf, token_bytes_of_json

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class _Wrapper:
    """The interface through which llguidance reads a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, found: TokenBytes, eos_token_ids: tuple[int, ...], build: Callable[[], tokenizers.Tokenizer]):
        # EOS is no text, whatever the files say: a grammar must not allow it where its name is.
        ends = [token for token in eos_token_ids if token < len(found.tokens)]
        self.tokens, self.special_token_ids = found.tokens, sorted({*found.special, *ends})
        self.eos_token_id = eos_token_ids[0]
        self._build: Callable[[], tokenizers.Tokenizer] | None = build
        self._tokenizer: tokenizers.Tokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text; llguidance asks for them where a grammar forces a text."""
        if self._tokenizer is None:
            assert self._build is not None, "the tokenizer is built once"
            self._tokenizer, self._build = self._build(), None
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = True  # their names in a text are text
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def build_vocabulary(files: Mapping[str, bytes], vocab_size: int, eos_token_ids: tuple[int, ...]) -> "LLTokenizer":
    """Return the vocabulary of these tokenizer files (see ipc/files/model_files.py).

    vocab_size: the model's; ids without a token are never allowed. Errors: ImportError without llguidance;
    ModelFileError for files without a tokenizer; UnsupportedModelError for a vocabulary whose tokens are not bytes.
    """
    from llguidance import LLTokenizer

    if "tokenizer.json" in files:
        content = files["tokenizer.json"]
        wrapper = _Wrapper(token_bytes_of_json(content), eos_token_ids, lambda: parse_tokenizer_json(content))
    elif GGUF_HEADER in files:
        metadata = parse_gguf_metadata(files[GGUF_HEADER])
        wrapper = _Wrapper(token_bytes_of_gguf(metadata), eos_token_ids, lambda: build_gguf_tokenizer(metadata))
    else:
        raise ModelFileError("the model has no tokenizer")
    size = max(vocab_size, len(wrapper.tokens))
    return LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_token_ids))  # type: ignore[arg-type]
