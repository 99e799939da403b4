"""read_vocabulary(): reads a model's vocabulary from its tokenizer files (ipc/files/model_files.py)."""

from collections.abc import Callable, Mapping

import tokenizers

from core.grammars.vocabulary import Divide, Vocabulary
from ipc.errors import ModelFileError
from ipc.files.gguf import parse_gguf_metadata
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import GGUF_HEADER
from ipc.files.token_bytes import token_bytes_of_gguf, token_bytes_of_json
from ipc.files.tokenizer_json import parse_tokenizer_json


def read_vocabulary(
    files: Mapping[str, bytes], vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple[Vocabulary, Callable[[], Divide]]:
    """Return a vocabulary, and a factory for the function that splits a text like the model's tokenizer.

    vocab_size: the model's; ids without a token are never allowed. Errors: ModelFileError for files without a
    tokenizer; UnsupportedModelError for a vocabulary whose tokens are not bytes.
    """
    build: Callable[[], tokenizers.Tokenizer]
    if "tokenizer.json" in files:
        content = files["tokenizer.json"]
        found, build = token_bytes_of_json(content), lambda: parse_tokenizer_json(content)
    elif GGUF_HEADER in files:
        metadata = parse_gguf_metadata(files[GGUF_HEADER])
        found, build = token_bytes_of_gguf(metadata), lambda: build_gguf_tokenizer(metadata)
    else:
        raise ModelFileError("the model has no tokenizer")
    # EOS is not text, whatever the files say: a grammar must not allow it where its name is allowed.
    ends = [token for token in eos_token_ids if token < len(found.tokens)]
    special = sorted({*found.special, *ends})
    size = max(vocab_size, len(found.tokens))
    return Vocabulary(found.tokens, special, size, eos_token_ids), lambda: _divide(build())


def _divide(tokenizer: tokenizers.Tokenizer) -> Divide:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # their names in a text are ordinary text
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
