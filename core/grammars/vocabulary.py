"""build_vocabulary(): a model's vocabulary, as llguidance needs it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ipc.files.gguf import parse_gguf_metadata
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import GGUF_HEADER
from ipc.files.tokenizer_json import parse_tokenizer_json
from ipc.token_bytes import read_token_bytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class _Wrapper:
    """The interface through which llguidance reads a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_token_id: int, files: Mapping[str, bytes]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos_token_id
        self._files = files
        self._encode: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text; llguidance asks for them to find forced tokens."""
        if self._encode is None:
            self._encode = _encoder(self._files)
        return self._encode(text)


def _encoder(files: Mapping[str, bytes]) -> Callable[[str], list[int]]:
    """Return the function from text to token ids."""
    if "tokenizer.json" in files:
        hf = parse_tokenizer_json(files["tokenizer.json"])
        hf.no_truncation()
        hf.no_padding()
    else:
        hf = build_gguf_tokenizer(parse_gguf_metadata(files[GGUF_HEADER]))
    hf.encode_special_tokens = True  # their names in a text are text
    return lambda text: hf.encode(text, add_special_tokens=False).ids


def build_vocabulary(files: Mapping[str, bytes], vocab_size: int, eos_token_ids: tuple[int, ...]) -> "LLTokenizer":
    """Return the vocabulary of these tokenizer files.

    vocab_size: the model's; ids without a token are never allowed. Errors: ImportError without llguidance;
    ModelFileError.
    """
    from llguidance import LLTokenizer

    tokens, special = read_token_bytes(files)
    # EOS is no text, whatever the files say: a grammar must not allow it where its name is.
    ends = [token for token in eos_token_ids if token < len(tokens)]
    wrapper = _Wrapper(tokens, sorted({*special, *ends}), eos_token_ids[0], files)
    return LLTokenizer(wrapper, n_vocab=max(vocab_size, len(tokens)), eos_token=list(eos_token_ids))  # type: ignore[arg-type]
