"""parse_tokenizer_json(): a model's tokenizer.json as the library's tokenizer."""

import tokenizers

from ipc.errors import ModelFileError


def parse_tokenizer_json(content: bytes) -> tokenizers.Tokenizer:
    """Return the tokenizer of this file content. Errors: ModelFileError."""
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ModelFileError(f"tokenizer.json is not a tokenizer: {error}") from error
    except BaseException as error:
        # The library's Rust panics (a merge whose result is not a token) have a class that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(f"tokenizer.json contradicts itself: {error}") from error
