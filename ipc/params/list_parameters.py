"""The sampling parameters that are lists and maps (stop, logit_bias, ...): their bounds and their checks.

The functions that use NumPy import it: messages are declared with these types, and a program that reads messages, but
has no such parameters, should not need 0.1 s for NumPy.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ipc.errors import InvalidRequestError
from ipc.params.parameter import integer

if TYPE_CHECKING:
    from ipc.tables.arrays import Ints

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
#: Most entries of allowed_token_ids: the largest vocabularies have 262,208 tokens.
MAX_ALLOWED_TOKENS = 300_000
#: Most entries of logit_bias.
MAX_LOGIT_BIASES = 65_536
#: Logit biases are clamped to [-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS], as in vLLM.
MAX_LOGIT_BIAS = 100.0
_MAX_DIGITS = 20  # of a token id as text

#: Types for a decoder. It checks a list's length before it makes the list, so a long one costs nothing.
StopStrings = Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[int, float], msgspec.Meta(max_length=MAX_LOGIT_BIASES)]
AllowedTokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_ALLOWED_TOKENS)]
BadWords = Annotated[list[str], msgspec.Meta(max_length=MAX_BAD_WORDS)]
_BadWord = Annotated[list[int], msgspec.Meta(max_length=MAX_BAD_WORD_TOKENS)]
BadWordsTokenIds = Annotated[list[_BadWord], msgspec.Meta(max_length=2 * MAX_BAD_WORDS)]


def check_stop_strings(stop: object) -> list[str]:
    """Return `stop` as a list. Errors: InvalidRequestError."""
    strings = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, (list, tuple)) else []
    if stop is not None and not isinstance(stop, (str, list, tuple)):
        raise InvalidRequestError(f"stop must be a string or a list of strings, got {stop!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(strings)}")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(f"stop strings have 1 to {MAX_STOP_STRING_CHARS} characters, got {string!r:.80}")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise InvalidRequestError(f"a stop string must be valid Unicode; {string!r:.80} has a lone surrogate")
    return strings


def check_stop_token_ids(ids: object) -> list[int]:
    """Return the ids; none for None. Errors: InvalidRequestError."""
    if ids is None:
        return []
    if not isinstance(ids, (list, tuple)) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return [integer("stop_token_ids", token, 0, 2**31 - 1) for token in ids]


def check_logit_bias(bias: object) -> dict[int, float] | None:
    """Return a copy with every bias clamped. Whole columns are checked at once: there may be tens of thousands."""
    if bias is None or bias == {}:
        return None
    import numpy as np

    if not isinstance(bias, dict):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {bias!r:.80}")
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias has at most {MAX_LOGIT_BIASES} entries, got {len(bias)}")
    if not {*map(type, bias)} <= {int} or not {*map(type, bias.values())} <= {int, float}:
        bias = _plain_bias(bias)
    keys = _token_ids("a token id in logit_bias", bias).tolist()
    try:
        values = np.fromiter(bias.values(), np.float64, len(bias))
    except OverflowError:  # an int beyond float64
        values = np.array([max(-MAX_LOGIT_BIAS, min(value, MAX_LOGIT_BIAS)) for value in bias.values()], np.float64)
    if np.isnan(values).any():
        raise InvalidRequestError(
            f"logit_bias of token {keys[int(np.isnan(values).argmax())]} must be a number, got nan"
        )
    return dict(zip(keys, values.clip(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).tolist(), strict=True))


def _plain_bias(bias: dict[Any, Any]) -> dict[int, float]:
    """Return the same with Python's own ints and floats: JSON keys are strings, and NumPy has scalars."""
    plain = {}
    if _are_numbers(bias):
        return dict(zip(map(int, bias), bias.values(), strict=True))
    for token, value in bias.items():
        is_number = isinstance(token, str) and token.isdecimal() and len(token) <= _MAX_DIGITS
        key = int(token) if is_number else token
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequestError(f"logit_bias of token {token!r:.80} must be a number, got {value!r:.80}")
        plain[integer("a token id in logit_bias", key, 0, 2**31 - 1)] = value
    return plain


def _are_numbers(bias: dict[Any, Any]) -> bool:
    """Return whether all tokens are numbers as text, and all biases Python's own numbers: JSON, with nothing wrong."""
    types = {*map(type, bias)}, {*map(type, bias.values())}
    if types[0] != {str} or not types[1] <= {int, float}:
        return False
    return all(map(str.isdecimal, bias)) and max(map(len, bias)) <= _MAX_DIGITS


def check_allowed_token_ids(ids: object) -> list[int] | None:
    """Return the ids sorted and without duplicates."""
    if ids is None:
        return None
    if not isinstance(ids, (list, tuple)) or not ids:
        raise InvalidRequestError(f"allowed_token_ids must be a list of at least one token id, got {ids!r:.80}")
    if len(ids) > MAX_ALLOWED_TOKENS:
        raise InvalidRequestError(f"allowed_token_ids has at most {MAX_ALLOWED_TOKENS} entries, got {len(ids)}")
    import numpy as np

    sorted_ids: list[int] = np.unique(_token_ids("allowed_token_ids", ids)).tolist()
    return sorted_ids


def _token_ids(name: str, ids: Collection[Any]) -> "Ints":
    """Return these token ids as an array. Errors: InvalidRequestError for the first that is not a token id."""
    import numpy as np

    if {*map(type, ids)} == {int}:
        try:
            column = np.fromiter(ids, np.int64, len(ids))
        except OverflowError:
            column = np.array([-1])
        if column.min() >= 0 and column.max() < 2**31:
            return column
    return np.array([integer(name, token, 0, 2**31 - 1) for token in ids], np.int64)


def check_bad_words(words: object) -> list[str] | None:
    """Return the words; None if there are none. Errors: InvalidRequestError."""
    if words is None or words == []:
        return None
    if not isinstance(words, (list, tuple)) or len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings, got {words!r:.80}")
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"a bad word has 1 to {MAX_BAD_WORD_CHARS} characters, not all of them spaces; got {word!r:.80}"
            )
        if any("\ud800" <= char <= "\udfff" for char in word):
            raise InvalidRequestError(f"a bad word must be valid Unicode; {word!r:.80} has a lone surrogate")
    return list(words)


def check_bad_words_token_ids(sequences: object) -> list[list[int]] | None:
    """Return the sequences of token ids; None if there are none. Errors: InvalidRequestError."""
    if sequences is None or sequences == []:
        return None
    if not isinstance(sequences, (list, tuple)) or len(sequences) > 2 * MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words_token_ids must be a list of at most {2 * MAX_BAD_WORDS} lists of token ids"
        )
    for ids in sequences:
        if not isinstance(ids, (list, tuple)) or not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens, got {ids!r:.80}")
    return [[integer("bad_words_token_ids", token, 0, 2**31 - 1) for token in ids] for ids in sequences]
