"""Prompts: read every form in which a caller may write one, and return token ids."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np

from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError, PromptTooLongError, UnsupportedParameterError


class TextPrompt(TypedDict, total=False):
    """A prompt written as text."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt written as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str  # the text they came from, for the output only
    cache_salt: str
    second_from: int  # where the second of two texts begins, for encoders that tell them apart; 0 = there is one


PromptInput: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt

_MAX_CACHE_SALT_CHARS = 1024
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "second_from")
#: Keys of vLLM's prompts that this version cannot serve.
_UNSUPPORTED_KEYS = ("prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "encoder_prompt")
_FORMS = "a str, a list of token ids, {'prompt': str} or {'prompt_token_ids': [...], 'cache_salt': ...}"


class Prompt(NamedTuple):
    """A prompt ready to be submitted."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    second_from: int = 0


def split_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return one prompt or many as a list. A str, a dict and a list of ints are one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(f"prompts must be one or a list of: {_FORMS}; got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], (int, np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def read_prompts(
    prompts: Sequence[PromptInput],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_model_len: int,
    add_special_tokens: bool = True,
    truncation: Sequence[int | None] | None = None,
    num_output_tokens: int = 1,
    keeps_beginnings: bool = False,
) -> list[Prompt]:
    """Return the prompts, tokenized and checked. All texts are tokenized together, in parallel.

    vocab_size: token ids that the model knows. max_model_len: tokens of prompt and output together. truncation: for
    each prompt, how many of its last tokens are kept; None = all, -1 = as many as fit. num_output_tokens: the room that
    is left for an output. keeps_beginnings: truncation keeps the first tokens and the very last one, which closes the
    text for an encoder. Errors: InvalidRequestError that states which prompt is wrong, how, and what would be right.
    """
    most = max_model_len - num_output_tokens
    forms = [_read_form(prompt, _name(index, len(prompts))) for index, prompt in enumerate(prompts)]
    texts = [text for text, token_ids, _, _ in forms if text is not None and token_ids is None]
    if texts and tokenizer is None:
        raise InvalidRequestError("this engine has no tokenizer: give token ids, {'prompt_token_ids': [...]}")
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens) if tokenizer is not None and texts else ())
    read = []
    for index, (text, token_ids, cache_salt, second_from) in enumerate(forms):
        name = _name(index, len(prompts))
        ids = next(encoded) if token_ids is None else _read_token_ids(token_ids, name)
        _check_vocabulary(ids, name, vocab_size)
        keep = truncation[index] if truncation is not None else None
        if keep is not None:
            ids = _truncated(ids, keep if keep > 0 else most, keeps_beginnings)
        if not ids:
            which = "" if len(prompts) == 1 else f" ({name})"
            raise InvalidRequestError(f"the prompt cannot be empty{which}; a prompt has at least one token")
        if len(ids) > most:
            raise PromptTooLongError(
                f"{name} has {len(ids)} tokens; at most {most} fit: the maximum context length is {max_model_len} "
                f"tokens, prompt and output together (max_model_len={max_model_len})"
            )
        if second_from and num_output_tokens:
            raise InvalidRequestError(f"{name}: 'second_from' is for requests that are pooled")
        read.append(Prompt(text, ids, cache_salt, min(second_from, len(ids) - 1)))
    return read


def _truncated(ids: list[int], keep: int, keeps_beginnings: bool) -> list[int]:
    """Return so many of the tokens: the last ones, or the first ones and the very last."""
    if len(ids) <= keep:
        return ids
    return ids[: keep - 1] + ids[-1:] if keeps_beginnings else ids[-keep:]


def _read_form(prompt: PromptInput, name: str) -> tuple[str | None, Any, str, int]:
    """Return (text, token ids, cache salt, second_from). Token ids are as given; None: the text is to be encoded."""
    if isinstance(prompt, str):
        return prompt, None, "", 0
    if not isinstance(prompt, Mapping):
        if prompt is None:
            raise InvalidRequestError(f"{name} must be {_FORMS}; got None")
        return None, prompt, "", 0
    for key, value in prompt.items():
        if key in _UNSUPPORTED_KEYS and value is not None:
            raise UnsupportedParameterError(f"{name}: {key!r} is not supported by this version; a prompt is {_FORMS}")
        if key not in _KEYS and key not in _UNSUPPORTED_KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidRequestError(f"{name}: unknown key {key!r}; {hint}a prompt is {_FORMS}")
    text, token_ids, cache_salt, second_from = (prompt.get(key) for key in _KEYS)
    for key, value in (("prompt", text), ("cache_salt", cache_salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name}: {key!r} must be a str, got {type(value).__name__}")
    if text is None and token_ids is None:
        raise InvalidRequestError(f"{name}: 'prompt' or 'prompt_token_ids' is missing; a prompt is {_FORMS}")
    _check_cache_salt(cache_salt or "", name)  # type: ignore[arg-type]
    if second_from is not None and (type(second_from) is not int or second_from < 0):
        raise InvalidRequestError(f"{name}: 'second_from' must be an int of at least 0, got {second_from!r:.80}")
    return text, token_ids, cache_salt or "", second_from or 0  # type: ignore[return-value]


def _check_cache_salt(salt: str, name: str) -> None:
    if len(salt) > _MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"{name}: 'cache_salt' has {len(salt)} characters; {_MAX_CACHE_SALT_CHARS} are allowed"
        )
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise InvalidRequestError(f"{name}: 'cache_salt' must be valid Unicode; {salt!r:.80} has a lone surrogate")


def _read_token_ids(token_ids: object, name: str) -> list[int]:
    if isinstance(token_ids, np.ndarray) and token_ids.ndim == 1 and token_ids.dtype.kind in "iu":
        ids: list[int] = token_ids.tolist()
    elif isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, bytearray)):
        ids = list(token_ids)
    else:
        raise InvalidRequestError(f"{name} must be {_FORMS}; got {type(token_ids).__name__}")
    kinds = set(map(type, ids))
    if kinds - {int}:
        wrong = [kind for kind in kinds if not issubclass(kind, (int, np.integer)) or kind is bool]
        if wrong:
            index = next(index for index, token in enumerate(ids) if type(token) in wrong)
            raise InvalidRequestError(f"{name}: token ids must be ints; at index {index} is {ids[index]!r:.80}")
        ids = [int(token) for token in ids]
    return ids


def _check_vocabulary(ids: list[int], name: str, vocab_size: int) -> None:
    """Raise InvalidRequestError for an id outside the vocabulary. A text can have one: a tokenizer may know more
    tokens.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{name}: token id {ids[index]} at index {index} is out of vocabulary; known are 0 to {vocab_size - 1}"
        )


def _name(index: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {index} of {count}"
