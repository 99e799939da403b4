"""Bad words: turn the words that a caller forbids into token sequences."""

from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError
from ipc.log_lines import counted
from ipc.params.list_parameters import MAX_BAD_WORD_TOKENS


def bad_words_token_ids(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token sequences of each word, as in vLLM.

    A word is encoded as the beginning of a text. It is also encoded after a space if that gives another sequence with
    the same number of tokens. Errors: InvalidRequestError for a word of too many tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if len(bare) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"the bad word {word!r:.80} has {counted(len(bare), 'token')}; at most {MAX_BAD_WORD_TOKENS} are "
                "allowed"
            )
        sequences += [bare] if bare else []
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences
